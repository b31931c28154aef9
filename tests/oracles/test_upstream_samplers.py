"""Who may begin and what a batch takes, in the situations of other frameworks' own unit tests, against what these expect.

The sources: NeMo-RL's tests/unit/algorithms/test_staleness_sampler.py at 6bd8e651, verl's
tests/trainer/ppo/v1/test_replay_buffer_on_cpu.py at 080a43f8, and AReaL's tests of its staleness manager
(areal/tests/test_staleness_manager.py, read in zhshgmail/AReaL at 2ab0169c).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prime_node.coordinator.state.batches import Ready, choose_ready, is_overdue, stale
from prime_protocol.schedule import Schedule, Selection
from prime_protocol.step import Admission


@pytest.mark.parametrize(
    ("concurrent", "size", "staleness", "version", "running", "accepted", "capacity"),
    [
        (10, 4, 2, 0, 0, 0, 10),
        (100, 32, 10, 0, 0, 0, 100),
        (5, 2, 10, 0, 3, 0, 2),
        (100, 4, 2, 0, 0, 0, 12),
        (1000, 4, 2, 5, 0, 0, 32),
        (10, 4, 2, 0, 3, 0, 7),
        (20, 4, 2, 0, 0, 5, 7),
        (5, 2, 5, 0, 5, 0, 0),
        (100, 8, 0, 0, 0, 0, 8),
        (100, 8, 0, 5, 0, 0, 48),
        (10, 1, 2, 0, 0, 0, 3),
        (10000, 64, 10, 1_000_000, 0, 0, 10000),
    ],
)
def test_areals_capacity(
    concurrent: int, size: int, staleness: int, version: int, running: int, accepted: int, capacity: int
) -> None:
    """What may run at once, and what the newest policy may begin: the smaller of both. AReaL counts rollouts, this groups."""
    schedule = Schedule.model_validate(
        {"preset": "areal", "max_head_offpolicyness": staleness, "max_concurrent_rollouts": concurrent}
    )
    ahead = schedule.slots_ahead(size, async_level=schedule.async_level(size, otherwise=0))
    rule = Admission(size, ahead, is_in_order=False)
    assert schedule.max_inflight_groups == concurrent
    assert min(concurrent - running, rule.slots_end(version) - running - accepted) == capacity


def ready(*versions: int) -> list[Ready]:
    """Return groups that were begun and accepted in the order of these policies."""
    return [Ready(slot, version, slot) for slot, version in enumerate(versions)]


def taken(versions: Sequence[int], count: int, *, step: int, lag_max: int, selection: Selection) -> list[int] | None:
    """Return the policies of a batch's groups, without those that are too old or newer than the step."""
    groups = ready(*versions)
    old = stale(groups, step=step, lag_max=lag_max)
    left = [group for group in groups if group.slot not in old and group.policy_version <= step]
    chosen = choose_ready(left, count, selection=selection, slots_end=len(groups))
    return None if chosen is None else [versions[slot] for slot in chosen]


def test_nemo_rls_sampler() -> None:
    """A newer policy than the step's is in its buffer only: here, no group is ever newer than the trainer's step."""
    freshest, first = Selection.FRESHEST_FIRST, Selection.LOWEST_SLOT_FIRST
    assert taken([5], 2, step=5, lag_max=2, selection=freshest) is None
    assert taken([], 1, step=5, lag_max=2, selection=freshest) is None
    assert taken([3, 4, 5, 2, 6], 2, step=5, lag_max=2, selection=freshest) == [4, 5]
    assert taken([3, 4, 5], 2, step=6, lag_max=5, selection=freshest) == [4, 5]
    assert taken([3, 4, 5], 2, step=6, lag_max=5, selection=first) == [3, 4]
    assert taken([4, 5, 5, 6], 3, step=5, lag_max=0, selection=freshest) is None
    assert taken([4, 5, 5, 6], 2, step=5, lag_max=0, selection=freshest) == [5, 5]
    assert stale(ready(0, 1, 4, 5, 2), step=5, lag_max=1) == (0, 1, 4)
    assert stale(ready(4, 5), step=5, lag_max=1) == ()
    assert stale(ready(1, 5), step=5, lag_max=1) == (0,)


def test_verls_two_strategies() -> None:
    """Its threshold counts the policies that a trajectory spans, so it is one more than `max_off_policy_steps`."""
    schedule = Schedule.model_validate({"preset": "verl_v1", "max_off_policy_threshold": 2})
    assert schedule.max_off_policy_steps == 1
    oldest_first = Selection.LOWEST_VERSION_FIRST
    assert taken([1000, 1000], 2, step=1000, lag_max=1, selection=oldest_first) == [1000, 1000], (
        "old work in flight is no matter"
    )
    assert taken([1000, 1000], 3, step=1000, lag_max=1, selection=oldest_first) is None
    assert taken([0, 5], 2, step=5, lag_max=0, selection=oldest_first) is None, "one of them is too old"
    assert is_overdue([0], step=1000, lag_max=1)
    assert not is_overdue([1000], step=1000, lag_max=1)
