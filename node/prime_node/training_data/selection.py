"""Selection of accepted groups for the next batch, and of those too old for it. Pure; used by the coordinator and by planners."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

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


def is_overdue(begun_versions: Iterable[int], *, step: int, lag_max: int) -> bool:
    """Return whether a group that is begun and not accepted would be too old for the batch after `step` (StalePolicy.WAIT)."""
    return any(step - version >= lag_max for version in begun_versions)


def choose_ready(
    ready: Sequence[Ready],
    count: int,
    *,
    selection: Selection,
    slots_end: int,
    begun_versions: Iterable[int] = (),
) -> tuple[int, ...] | None:
    """Return the slots of a batch of `count` groups, ascending; None if it must wait.

    `slots_end` bounds Selection.WINDOW. `begun_versions` holds the policy of each group that is begun and not accepted:
    Selection.VERSION_FIFO waits for those that come before a group that it would take.
    """
    if selection is Selection.WINDOW:
        ready = [group for group in ready if group.slot < slots_end]
    if len(ready) < count:
        return None
    chosen = sorted(ready, key=_RANKS[selection])[:count]  # mostly sorted already, which makes sorting fast
    if selection is Selection.VERSION_FIFO and min(begun_versions, default=inf) < chosen[-1].policy_version:
        return None
    return tuple(sorted(group.slot for group in chosen))


_RANKS: Mapping[Selection, Callable[[Ready], Any]] = {
    Selection.READY_FIRST: attrgetter("order"),
    Selection.WINDOW: attrgetter("order"),
    Selection.LOWEST_SLOT_FIRST: attrgetter("slot"),
    Selection.LOWEST_VERSION_FIRST: attrgetter("policy_version", "order"),
    Selection.VERSION_FIFO: attrgetter("policy_version", "slot"),
    Selection.FRESHEST_FIRST: lambda group: (-group.policy_version, group.slot),
}
"""Training order of ready groups, by selection."""
