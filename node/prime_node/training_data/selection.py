"""Selection of accepted groups for the next batch, and of those too old for it. Pure; used by the coordinator and by planners.

A group's *deadline* is the last step that may train it: the policy that its staleness is counted from, plus
max_off_policy_steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from prime_protocol.schedule import Selection


class Ready(NamedTuple):
    """An accepted group that is in no batch yet."""

    slot: int
    policy_version: int
    """Policy from which its staleness is counted."""
    order: int
    """Position among all groups in the order of acceptance."""


def stale(ready: Iterable[Ready], *, step: int, lag_max: int) -> tuple[int, ...]:
    """Return the slots of groups that are too old for `step`, ascending."""
    return tuple(sorted(group.slot for group in ready if step - group.policy_version > lag_max))


def choose_ready(ready: Sequence[Ready], count: int, *, selection: Selection, slots_end: int) -> tuple[int, ...] | None:
    """Return the slots of a batch of `count` groups, ascending; None if it must wait.

    `slots_end` bounds Selection.WINDOW.
    """
    if selection is Selection.WINDOW:
        ready = [group for group in ready if group.slot < slots_end]
    if len(ready) < count:
        return None
    return tuple(sorted(group.slot for group in _ranked(ready, selection)[:count]))


def choose_in_time(
    ready: Sequence[Ready],
    begun_versions: Iterable[int],
    count: int,
    *,
    step: int,
    capacity_left: int,
    groups_per_step: int,
    lag_max: int,
    selection: Selection,
) -> tuple[int, ...] | None:
    """Choose under StalePolicy.WAIT: include, or wait for, every group that would be too old for the next batch.

    For each deadline d, the steps up to d can still train `capacity_left` (of this step, after this batch) plus a whole
    step for each later one. Groups beyond that must be in this batch; it waits for those that are not ready.
    """
    due = Counter(max(step, group.policy_version + lag_max) for group in ready)
    due.update(max(step, version + lag_max) for version in begun_versions)
    by_rank = _ranked(ready, selection)
    chosen: dict[int, Ready] = {}
    num_due = 0
    for deadline in sorted(due):
        num_due += due[deadline]
        needed = num_due - capacity_left - groups_per_step * (deadline - step)
        in_time = [group for group in by_rank if group.policy_version + lag_max <= deadline]
        have = sum(group.slot in chosen for group in in_time)
        for group in in_time:
            if have >= min(needed, count):
                break
            if group.slot not in chosen:
                chosen[group.slot] = group
                have += 1
        if have < min(needed, count):
            return None
    assert len(chosen) <= count
    if len(ready) < count:
        return None
    rest = (group for group in by_rank if group.slot not in chosen)
    return tuple(sorted([*chosen, *(group.slot for group, _ in zip(rest, range(count - len(chosen)), strict=False))]))


def _ranked(ready: Iterable[Ready], selection: Selection) -> list[Ready]:
    """Return the groups in training order. The input is mostly sorted already, which makes sorting fast."""
    names = ("policy_version", "order") if selection is Selection.LOWEST_VERSION_FIRST else ("order",)
    return sorted(ready, key=attrgetter(*names))
