"""A store in memory, for tests and simulations. It lasts as long as the object."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import accumulate

from prime_node.ports.store import PAGE_CHARS_MAX, Chapter, LoggedEvent, Segment, StoreConflict, StoredReceipt


class MemoryStore:
    """Implementation of ports.store.Store."""

    def __init__(self) -> None:
        self._events: list[LoggedEvent] = []
        self._receipts: dict[str, tuple[int, StoredReceipt]] = {}  # bundle -> (number of the change, receipt)
        self._bundle_of: dict[str, str] = {}  # lease -> bundle
        self._last_number = 0
        self._changes = 0
        self._snapshot: tuple[int, str] | None = None
        self._ledger: list[str] = []
        self._segments: list[Segment] = []

    async def check(self) -> None:
        """Do nothing: memory does not rot here."""

    async def append(
        self,
        events: Sequence[LoggedEvent],
        receipts: Sequence[StoredReceipt] = (),
        ledger: Sequence[str] = (),
    ) -> None:
        """Append events, receipts and ledger lines in one step. Raises StoreConflict."""
        expected = range(self._last_number + 1, self._last_number + 1 + len(events))
        if [event.number for event in events] != list(expected):
            raise StoreConflict(f"the next event is {self._last_number + 1}")
        for receipt in receipts:
            if self._bundle_of.get(receipt.lease_id, receipt.bundle) != receipt.bundle:
                raise StoreConflict(f"lease {receipt.lease_id} is already redeemed")
        self._events += events
        self._last_number += len(events)
        for receipt in receipts:
            self._changes += 1
            self._receipts[receipt.bundle] = (self._changes, receipt)
            self._bundle_of[receipt.lease_id] = receipt.bundle
        self._ledger += ledger

    async def events(self, *, after: int) -> AsyncIterator[LoggedEvent]:
        """Yield the events after a number."""
        for event in list(self._events):
            if event.number > after:
                yield event

    async def save_snapshot(
        self, number: int, payload: str, segment: Segment | None = None, *, kept_from: int = 0
    ) -> None:
        """Replace the snapshot, drop the events before its number, and archive a segment.

        The last event shows a follower that it lags.
        """
        self._snapshot = (number, payload)
        archived = [] if segment is None else [segment]
        self._segments = [one for one in (*self._segments, *archived) if one.chapter >= kept_from]
        self._events = [event for event in self._events if event.number >= number]

    async def latest_snapshot(self) -> tuple[int, str] | None:
        """Return the number and payload of the snapshot, or None."""
        return self._snapshot

    async def segments(self, *, after: int) -> AsyncIterator[Segment]:
        """Yield the segments after an event."""
        for segment in list(self._segments):
            if segment.last > after:
                yield segment

    async def chapters(self) -> list[Chapter]:
        found: dict[int, Chapter] = {}
        for one in self._segments:
            known = found.get(one.chapter)
            size = len(one.payload)
            new = Chapter(one.first, one.last, one.at_ms, size, size) if known is None else known.with_segment(one)
            found[one.chapter] = new
        return list(found.values())

    async def receipt(self, bundle: str) -> StoredReceipt | None:
        return self._receipts[bundle][1] if bundle in self._receipts else None

    async def receipts_of(
        self, worker: str | None, *, after: int, limit: int, chars_max: int = PAGE_CHARS_MAX
    ) -> tuple[list[StoredReceipt], int]:
        """Return a page of receipts and the number of the last change in it."""
        found = [row for row in self._receipts.values() if worker in (None, row[1].worker) and row[0] > after]
        rows = sorted(found, key=lambda row: row[0])[:limit]
        rows = rows[: _fitting([len(receipt.envelope) for _, receipt in rows], chars_max)]
        return [receipt for _, receipt in rows], rows[-1][0] if rows else after

    async def ledger(self, *, start: int, limit: int, chars_max: int = PAGE_CHARS_MAX) -> list[str]:
        """Return a page of ledger lines."""
        lines = self._ledger[start : start + limit]
        return lines[: _fitting(map(len, lines), chars_max)]

    async def ledger_length(self) -> int:
        return len(self._ledger)

    async def close(self) -> None:
        """Do nothing: there is no file to close."""


def _fitting(sizes: Iterable[int], chars_max: int) -> int:
    """Return how many of the first texts fit into `chars_max` characters, at least one."""
    return max(1, sum(total <= chars_max for total in accumulate(sizes)))
