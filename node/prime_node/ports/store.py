"""The coordinator's durable storage: an event log, state snapshots, receipts by bundle, the ledger.

The state machine is pure (coordinator/state/tick.py), so the log is authoritative: state = fold(snapshot, events after
it).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

PAGE_CHARS_MAX = 2**20
"""Default number of characters in one page of receipts or of the ledger; as UTF-8 at most LEDGER_PAGE_BYTES_MAX."""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One entry of the log. Example: LoggedEvent(1, 1763690000000, '{"type":"worker_joined",...}')."""

    number: int
    """Sequence number: 1, 2, 3, ... without gaps."""
    at_ms: int
    payload: str
    """JSON of the event."""


@dataclass(frozen=True, slots=True)
class StoredReceipt:
    """A bundle's latest receipt."""

    bundle: str
    lease_id: str
    worker: str
    step: int
    status: str
    """Value of a BundleStatus."""
    envelope: str
    """Signed receipt, as JSON."""


class Store(Protocol):
    """Durable storage with one writer. When a writing method has returned, its data survives kill -9 and power loss."""

    async def append(
        self,
        events: Sequence[LoggedEvent],
        receipts: Sequence[StoredReceipt] = (),
        ledger: Sequence[str] = (),
    ) -> None:
        """Add events, receipts and ledger lines in one transaction: all or nothing.

        A receipt replaces the one of the same bundle. Raises StoreConflict if an event number is taken (another
        coordinator writes to the same store) or if a lease would be redeemed by a second bundle.
        """
        ...

    def events(self, *, after: int) -> AsyncIterator[LoggedEvent]:
        """Iterate over events with a number above `after`, in order."""
        ...

    async def save_snapshot(self, number: int, payload: str) -> None:
        """Save the state after event `number`. Older snapshots and the events before it may be deleted."""
        ...

    async def latest_snapshot(self) -> tuple[int, str] | None:
        """Return the newest snapshot as (event number, state), None if there is none."""
        ...

    async def receipt(self, bundle: str) -> StoredReceipt | None:
        """Return a bundle's latest receipt, None if there is none."""
        ...

    async def receipts_of(
        self, worker: str | None, *, after: int, limit: int, chars_max: int = PAGE_CHARS_MAX
    ) -> tuple[list[StoredReceipt], int]:
        """Return receipts from cursor `after` on, in the order of their last change, and the next cursor.

        The receipts are one worker's, or all workers' if `worker` is None. There are at most `limit`, and their
        envelopes have at most `chars_max` characters together; a single longer one is still returned.
        """
        ...

    async def ledger(self, *, start: int, limit: int, chars_max: int = PAGE_CHARS_MAX) -> list[str]:
        """Return ledger lines from line `start` (0 is the first), with the same bounds."""
        ...

    async def ledger_length(self) -> int:
        """Return the number of lines in the ledger."""
        ...

    async def close(self) -> None:
        """Close the store."""
        ...


class StoreConflict(Exception):
    """The write would corrupt the log. Nothing was written."""
