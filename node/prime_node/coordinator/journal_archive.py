"""The archive of the journal: with each snapshot, the events that the store forgets become a segment (journal_segments.py).

Segment and snapshot are written in one transaction, so the archive has no gap after a crash. A chapter begins with the state; the
next one begins once its segments are CHAPTER_SEGMENTS times as large as the first, so that states take a fifth of the
archive at most. The oldest chapters are deleted by age and by size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from prime_node import __version__
from prime_node.coordinator.journal_segments import (
    FORMAT,
    DamagedSegment,
    LedgerPoint,
    SegmentHeader,
    decode_segment,
    encode_segment,
)
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.snapshot import state_to_json
from prime_node.ports.store import Chapter, LoggedEvent, Segment, Store
from prime_protocol.digest import digest_of

CHAPTER_SEGMENTS = 5
_DAY_MS = 86_400_000


class JournalArchive:
    """The segments that a journal writes. Created by `open_archive`."""

    def __init__(
        self,
        store: Store,
        initial: State,
        *,
        run: str,
        days: float,
        bytes_max: float,
        chapters: list[Chapter],
        previous: str,
        ledger: LedgerPoint | None,
        backlog: list[LoggedEvent],
    ) -> None:
        self._store, self._initial, self._run = store, state_to_json(initial), run
        self._days, self._bytes_max = days, bytes_max
        self._chapters = chapters
        self._previous = previous
        """Digest of the newest segment; empty if there is none."""
        self._ledger = ledger
        """End of the ledger after the newest segment; None if that is unknown."""
        self._opening = ""
        """Digest of the state after it, as far as this process knows; a chapter begins where it is unknown."""
        self._backlog = backlog
        """Events after the newest segment that this process has not recorded itself."""

    async def next_segment(
        self, events: Sequence[LoggedEvent], closing: str, ledger: LedgerPoint
    ) -> tuple[Segment | None, int]:
        """Return the segment of the events since the last one, and the chapter from which on the archive is kept.

        `closing` is the state after these events, as JSON, and `ledger` the end of the ledger.
        """
        if not self._days or not self._bytes_max:
            self._chapters, self._previous, self._opening, self._ledger, self._backlog = [], "", "", None, []
            return None, events[-1].number + 1 if events else 0
        chosen, self._backlog = [*self._backlog, *events], []
        if not chosen:
            return None, 0
        opening = ""
        if not self._opening or not self._chapters or self._chapters[-1].is_full(CHAPTER_SEGMENTS):
            latest = await self._store.latest_snapshot()
            opening = self._initial if latest is None else latest[1]
            if latest is None:
                self._ledger = LedgerPoint(0, self._run)
        first, last = chosen[0].number, chosen[-1]
        segment = await asyncio.to_thread(self._make, opening, chosen, closing, ledger)
        self._ledger = ledger
        size = len(segment.payload)
        if opening:
            self._chapters.append(Chapter(first, last.number, last.at_ms, size, size))
        else:
            self._chapters[-1] = self._chapters[-1].with_segment(segment)
        return segment, self._kept_from(last.at_ms)

    def _make(self, opening: str, events: Sequence[LoggedEvent], closing: str, ledger: LedgerPoint) -> Segment:
        before = digest_of(opening.encode()) if opening else self._opening
        after = digest_of(closing.encode())
        first, last = events[0].number, events[-1]
        header = SegmentHeader(
            format=FORMAT,
            software=__version__,
            first=first,
            num_events=len(events),
            previous=self._previous,
            opening=before,
            closing=after,
            ledger_before=self._ledger,
            ledger_after=ledger,
        )
        payload = encode_segment(header, opening, events)
        self._previous, self._opening = digest_of(payload.encode()), after
        return Segment(first, last.number, first if opening else self._chapters[-1].first, last.at_ms, payload)

    def _kept_from(self, now_ms: int) -> int:
        """Forget the chapters that are too old or too many, but not the newest. Return the first one that stays."""
        total = sum(chapter.num_bytes for chapter in self._chapters)
        while len(self._chapters) > 1:
            oldest = self._chapters[0]
            if oldest.at_ms >= now_ms - self._days * _DAY_MS and total <= self._bytes_max:
                break
            total -= oldest.num_bytes
            del self._chapters[0]
        return self._chapters[0].first


async def open_archive(store: Store, initial: State, *, run: str, days: float, bytes_max: float) -> JournalArchive:
    """Open the archive of a store where the journal continues. `initial` is the state before the first event.

    Each start begins a chapter, since another release may fold the events from then on. `coordinator replay` names a newest
    segment that is damaged. Raises LocalError for a row that is not as it was written.
    """
    chapters = await store.chapters()
    previous, point, end = "", None, 0
    if chapters:
        end = chapters[-1].last
        async for segment in store.segments(after=end - 1):
            previous = digest_of(segment.payload.encode())
            try:
                point = (await asyncio.to_thread(decode_segment, segment)).header.ledger_after
            except DamagedSegment:
                point = None
    elif (latest := await store.latest_snapshot()) is not None:
        end = latest[0]
    backlog = [logged async for logged in store.events(after=end)]
    return JournalArchive(
        store,
        initial,
        run=run,
        days=days,
        bytes_max=bytes_max,
        chapters=chapters,
        previous=previous,
        ledger=point,
        backlog=backlog,
    )
