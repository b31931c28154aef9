"""From rewards to what is trained: advantages, filters, and the learning rate's schedule."""

from __future__ import annotations

import pytest

from prime_node.algo.advantages import AdvantageInputs, find_advantage
from prime_node.algo.filters import FilterInputs, find_filters, flags
from prime_node.algo.schedule import Damping, LinearSchedule
from prime_node.ports.train_backend import Group
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason


def test_the_advantage_is_the_reward_minus_the_mean_without_a_deviation() -> None:
    advantage = find_advantage("group_mean")
    assert advantage(AdvantageInputs((1.0, 0.0, 0.5), (3, 1, 8))) == [0.5, -0.5, 0.0]
    assert advantage(AdvantageInputs((0.7,), (3,))) == [0.0]
    assert advantage(AdvantageInputs((0.1,) * 7, (1,) * 7)) == [0.0] * 7
    assert advantage(AdvantageInputs((), ())) == []


def group(*rewards: float) -> Group:
    completion = Completion((1, 2), (-0.1, -0.2), FinishReason.STOP)
    return Group(0, (9,), (completion,) * len(rewards), rewards, (0,) * len(rewards), "worker")


def test_the_first_filter_that_matches_names_the_rollout() -> None:
    filters = {
        "second_only": lambda given: [index == 1 for index in range(len(given.advantages))],
        **find_filters(["zero_advantage"]),
    }
    given = FilterInputs(group(1.0, 0.0, 0.5), (0.5, 0.0, 0.0))
    assert flags(filters, given) == [None, "second_only", "zero_advantage"]
    assert flags({}, given) == [None, None, None]
    with pytest.raises(LocalError, match="no filter is called"):
        find_filters(["zero"])


def test_the_schedule_rises_and_falls() -> None:
    schedule = LinearSchedule(1.0, warmup_steps=5, total_steps=400, final_share=0.1)
    assert schedule.at(0) == pytest.approx(0.2)
    assert schedule.at(4) == pytest.approx(1 - 0.9 * 4 / 400)
    assert schedule.at(399) == pytest.approx(0.1, abs=0.003)
    assert schedule.at(10_000) == pytest.approx(0.1)
    assert LinearSchedule(2.0, 0, 1, 1.0).at(77) == 2.0


def test_damping_falls_fast_recovers_slowly_and_has_a_floor() -> None:
    damping = Damping(0.1)
    assert damping.after(1.0, 0.2) == 0.75
    assert damping.after(0.5, 0.12) == 0.5
    assert damping.after(0.5, 0.05) == pytest.approx(0.525)
    assert damping.after(1.0, 0.0) == 1.0
    assert damping.after(0.16, 9.0) == 0.15
