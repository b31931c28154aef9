"""The overlap metric compared with manual calculations, and with the formula for the time of a step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from prime_node.coordinator.measure.zero_overhead import WaitingRules, Work, published_at
from prime_protocol.step import Admission

R = 4


def times(
    seconds: list[float], *, k: int = 0, workers: int = R, train: float = 1.0, usable: float = 0.0, **mode: object
) -> list[float]:
    in_order = bool(mode.get("in_order", True))
    how = WaitingRules(Admission(R, (1 + k) * R, in_order), int(str(mode.get("batches", 1))))
    works = [Work(slot, 1, each) for slot, each in enumerate(seconds)]
    steps = len(seconds) // R
    return published_at(
        works, how, workers=workers, train_seconds=lambda step: train, available_seconds=usable, num_steps=steps
    )


def test_on_policy_everything_follows_one_another() -> None:
    assert times([2.0] * 12, usable=0.5) == [3.0, 6.5, 10.0]  # 2 generating, 1 training, 0.5 in progress


def test_a_step_waits_for_its_slowest_group() -> None:
    assert times([1.0, 1.0, 5.0, 1.0], k=2) == [6.0]


def test_few_workers_take_turns_in_the_order_of_the_slots() -> None:
    # 3 and 1 at once, then 1 and 1 after the second: 3, and the others at 3
    assert times([3.0, 1.0, 1.0, 1.0], workers=2) == [4.0]


def test_ready_first_does_not_wait_for_a_straggler() -> None:
    seconds = [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert times(seconds, k=1, workers=8) == [10.0, 11.0]
    assert times(seconds, k=1, workers=8, in_order=False) == [2.0, 10.0]  # four are there at 1, the last four at 9


def test_a_step_of_several_batches_trains_as_they_come() -> None:
    seconds = [1.0, 1.0, 4.0, 4.0]
    assert times(seconds, in_order=False) == [5.0]
    assert times(seconds, in_order=False, batches=2) == [4.5]  # the first half is trained meanwhile


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("usable", [0.0, 0.5, 1.0, 2.0])
def test_the_time_of_a_step_is_that_of_the_formula(k: int, usable: float) -> None:
    found = times([1.0] * R * 60, k=k, usable=usable)
    steps = [after - before for before, after in pairwise(found)][20:]
    assert sum(steps) / len(steps) == pytest.approx(max(1.0, (1.0 + 1.0 + usable) / (k + 1)), rel=0.03)


def test_leases_that_do_not_tile_the_steps_wedge_nothing() -> None:
    works = [Work(0, 3, 2.0), Work(3, 3, 2.0), Work(6, 2, 2.0)]
    how = WaitingRules(Admission(R, R, is_in_order=True))
    found = published_at(works, how, workers=2, train_seconds=lambda step: 1.0, available_seconds=0.0, num_steps=2)
    assert found == [3.0, 6.0]


def test_one_lease_may_hold_several_groups() -> None:
    mode = WaitingRules(Admission(R, R, is_in_order=True))
    works = [Work(0, 3, 2.0), Work(3, 1, 1.0)]
    found = published_at(works, mode, workers=1, train_seconds=lambda step: 0.5, available_seconds=0.0, num_steps=1)
    assert found == [3.5]
