"""The coordinator's durable memory: a log of events, snapshots of the state that they fold to, receipts by bundle, the ledger.

The state machine is pure (coordinator/state/tick.py), so the log is the truth: state = fold(snapshot, events after it).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

PAGE_CHARS_MAX = 2**20
"""Characters of one page of receipts or of the ledger, where the caller says nothing else; as UTF-8 no more than
LEDGER_PAGE_BYTES_MAX."""


@dataclass(frozen=True, slots=True)
class LoggedEvent:
    """One entry of the log. Example: LoggedEvent(1, 1763690000000, '{"type":"worker_joined",...}')."""

    number: int
    """1, 2, 3, ... without gap."""
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
    """BundleStatus."""
    envelope: str
    """The signed receipt, JSON."""


class Store(Protocol):
    """One writer. When a method that writes has returned, what it wrote survives kill -9 and power loss."""

    async def append(
        self,
        events: Sequence[LoggedEvent],
        receipts: Sequence[StoredReceipt] = (),
        ledger: Sequence[str] = (),
    ) -> None:
        """Add events, put receipts and add lines to the ledger in one transaction: all or nothing.

        A receipt replaces the one of the same bundle. Raises StoreConflict where an event number is taken (another
        coordinator writes to the same store) or where a lease would be redeemed by a second bundle.
        """
        ...

    def events(self, *, after: int) -> AsyncIterator[LoggedEvent]:
        """Events with a number above `after`, in order."""
        ...

    async def save_snapshot(self, number: int, payload: str) -> None:
        """The state after event `number`. Older snapshots and the events before it may be forgotten."""
        ...

    async def latest_snapshot(self) -> tuple[int, str] | None: ...

    async def receipt(self, bundle: str) -> StoredReceipt | None: ...

    async def receipts_of(
        self, worker: str | None, *, after: int, limit: int, chars_max: int = PAGE_CHARS_MAX
    ) -> tuple[list[StoredReceipt], int]:
        """A worker's receipts, or None for everybody's, in the order of their last change, from a cursor; and the next cursor.

        At most `limit`, and no more than whose envelopes have `chars_max` together, but for a single one.
        """
        ...

    async def ledger(self, *, start: int, limit: int, chars_max: int = PAGE_CHARS_MAX) -> list[str]:
        """Lines of the ledger from line `start` (0 is the first); bounded likewise."""
        ...

    async def ledger_length(self) -> int:
        """Lines in the ledger."""
        ...

    async def close(self) -> None: ...


class StoreConflict(Exception):
    """The write would break the log. Nothing was written."""
