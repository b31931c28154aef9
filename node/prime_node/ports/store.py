"""The coordinator's durable storage: an event log, state snapshots, receipts by bundle, the ledger.

The state machine is pure (coordinator/state/tick.py), so the log is authoritative: state = fold(snapshot, events after
it).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from prime_protocol.errors import LocalError

PAGE_CHARS_MAX = 2**20
"""Default number of characters in one page of receipts or of the ledger; as UTF-8 at most LEDGER_PAGE_BYTES_MAX."""


class LoggedEvent(NamedTuple):  # a restart makes a million: a frozen dataclass costs four times as much
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


@dataclass(frozen=True, slots=True)
class Segment:
    """A row of the archived journal: events `first` to `last`, as coordinator/journal_segments.py writes them."""

    first: int
    last: int
    chapter: int
    """First event of the chapter that it belongs to. The segment with this `first` holds the state before it."""
    at_ms: int
    """Time of its last event."""
    payload: str


@dataclass(frozen=True, slots=True)
class Chapter:
    """Consecutive segments of the archive that are read, and deleted, together."""

    first: int
    """Number of its first event."""
    last: int
    at_ms: int
    """Time of its last event."""
    opening_bytes: int
    """Bytes of its first segment, which holds a state."""
    num_bytes: int
    """Bytes of all its segments."""

    def is_full(self, segments: int) -> bool:
        """Return whether it is `segments` times as large as its first segment."""
        return self.num_bytes >= segments * self.opening_bytes

    def with_segment(self, segment: Segment) -> Chapter:
        """Return the chapter with its next segment."""
        num_bytes = self.num_bytes + len(segment.payload)
        return replace(self, last=segment.last, at_ms=segment.at_ms, num_bytes=num_bytes)


class Store(Protocol):
    """Durable storage with one writer. When a writing method has returned, its data survives kill -9 and power loss.

    Writing methods raise LocalError if the disk or the server fails. The caller then opens the store again before it writes more.
    Reading methods raise LocalError for a row that is not as it was written.
    """

    async def check(self) -> None:
        """Read what is stored, except for the events. Raises LocalError that names what a disk changed or lost."""

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

    def events(self, *, after: int) -> AsyncIterator[LoggedEvent]:
        """Iterate over events with a number above `after`, in order."""

    async def save_snapshot(
        self, number: int, payload: str, segment: Segment | None = None, *, kept_from: int = 0
    ) -> None:
        """Save the state after event `number`. Older snapshots and the events before it may be deleted.

        In the same transaction, archive a segment, and delete the chapters before `kept_from`. May be called while `append` is
        in progress.
        """

    async def latest_snapshot(self) -> tuple[int, str] | None:
        """Return the newest snapshot as (event number, state), None if there is none."""

    def segments(self, *, after: int) -> AsyncIterator[Segment]:
        """Iterate over the archived segments whose last event has a number above `after`, in order."""

    async def chapters(self) -> list[Chapter]:
        """Return the chapters of the archive, oldest first, without reading their segments."""

    async def receipt(self, bundle: str) -> StoredReceipt | None:
        """Return a bundle's latest receipt, None if there is none."""

    async def receipts_of(
        self, worker: str | None, *, after: int, limit: int, chars_max: int = PAGE_CHARS_MAX
    ) -> tuple[list[StoredReceipt], int]:
        """Return receipts from cursor `after` on, in the order of their last change, and the next cursor.

        The receipts are one worker's, or all workers' if `worker` is None. There are at most `limit`, and their
        envelopes have at most `chars_max` characters together; a single longer one is still returned.
        """

    async def ledger(self, *, start: int, limit: int, chars_max: int = PAGE_CHARS_MAX) -> list[str]:
        """Return ledger lines from line `start` (0 is the first), with the same bounds."""

    async def ledger_length(self) -> int:
        """Return the number of lines in the ledger."""

    async def close(self) -> None:
        """Close the store."""


class DamagedRow(LocalError):
    """A stored row is not as it was written."""

    def __init__(self, row: str, detail: str) -> None:
        super().__init__(detail)
        self.row = row
        """Name of the row, or of what else is damaged. Example: "row 17 of ledger"."""


class StoreConflict(LocalError):
    """The write would corrupt the log, for example because another coordinator writes too. Nothing was written."""
