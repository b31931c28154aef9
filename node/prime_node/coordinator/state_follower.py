"""The state of a run, read from the store of a coordinator: once, or again and again while another coordinator writes."""

from __future__ import annotations

import gc

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import snapshot
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import SchedulerRules
from prime_node.coordinator.state.tick import tick
from prime_node.ports.store import Store
from prime_protocol.errors import LocalError

LOADS_MAX = 5
"""Number of snapshots from which a reader begins while a coordinator saves newer ones."""


class StateFollower:
    """The state after event `number`, which follows the store's log."""

    def __init__(self, store: Store, rules: SchedulerRules) -> None:
        self._store, self._rules = store, rules
        self.number = 0
        """Number of the last event."""
        self.state = State(rules)
        self._snapshot: int | None = -1
        """Event of the snapshot from which the state was read; None if the store had none, -1 before the first reading."""

    async def catch_up(self) -> None:
        """Fold all events in the store. A running coordinator may save a snapshot meanwhile, which deletes events.

        Raises LocalError if the store belongs to another run or release, or lacks events.
        """
        if self._snapshot == -1:
            await self._load()
        await self._fold()
        if self.state.rules != self._rules:
            raise LocalError("the coordinator's store belongs to another run; give each run its own folder")

    async def _fold(self) -> None:
        for _ in range(LOADS_MAX):
            missing = await self._fold_after()
            if missing is None:
                return
            known = self._snapshot
            await self._load()
            if known == self._snapshot:
                raise LocalError(
                    f"event {missing} is missing in the coordinator's store: put back a copy of the run's folder or database"
                )
        raise LocalError(f"the coordinator saved {LOADS_MAX} snapshots while its store was read: try again")

    async def _load(self) -> None:
        """Begin from the newest snapshot."""
        latest = await self._store.latest_snapshot()
        if latest is None:
            self._snapshot, self.number, self.state = None, 0, State(self._rules)
        else:
            try:
                self.number, self.state = latest[0], snapshot.state_from_json(latest[1])
            except Exception as error:  # what a row can cause that no coordinator wrote
                raise _strange(f"snapshot {latest[0]}", error) from error
            self._snapshot = self.number

    async def _fold_after(self) -> int | None:
        """Fold the events after the last one. Return the number of a missing event."""
        state, last = self.state, self.number
        async for number, at_ms, payload in self._store.events(after=last):
            if number != last + 1:
                return last + 1
            try:
                tick(state, ev.event_from_json(payload), at_ms)
            except Exception as error:
                raise _strange(f"event {number}", error) from error
            self.number = last = number
        return None


def _strange(row: str, error: Exception) -> LocalError:
    return LocalError(
        f"{row} in the coordinator's store is of another release, or damaged ({type(error).__name__}): install that release, or "
        "put back a copy of the run's folder or database"
    )


async def restore_state(store: Store, rules: SchedulerRules) -> tuple[int, State]:
    """Return the number of the last event and the state after it, from a snapshot and every event since.

    Raise LocalError if the store belongs to another run or release.
    """
    follower, was_collecting = StateFollower(store, rules), gc.isenabled()
    gc.disable()  # a million events leave no cycles, and a collection looks at all that they built
    try:
        await follower.catch_up()
    finally:
        if was_collecting:
            gc.enable()
    return follower.number, follower.state
