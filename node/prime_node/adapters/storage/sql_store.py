"""The store in four SQL tables: what SQLite and PostgreSQL have in common.

A `Database` runs statements; sqlite_store.py and postgres_store.py implement it. Parameters are `$1`, `$2`, ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prime_node.adapters.storage.row_digests import CHAINED, chained, damaged, event_digest, require_intact, sealed
from prime_node.adapters.storage.schema_versions import READ_INFO, StoreInfo
from prime_node.ports.store import PAGE_CHARS_MAX, Chapter, LoggedEvent, Segment, StoreConflict, StoredReceipt
from prime_protocol.errors import LocalError

ROWS_MAX = 5_000
"""Rows of the log that are read at once."""
TABLES: Mapping[str, tuple[str, ...]] = {
    "events": ("number", "at_ms", "payload", "digest"),
    "snapshots": ("number", "payload", "digest"),
    "receipts": ("change", "bundle", "lease_id", "worker", "step", "status", "envelope", "digest"),
    "ledger": ("number", "line", "digest"),
    "journal": ("number", "first", "chapter", "at_ms", "num_bytes", "payload", "digest"),
}
"""The tables with their columns. The first column is a unique number, in the order of which rows are read.

The last one is the row's digest (row_digests.py)."""


Row = Sequence[Any]
"""Values of the columns of a table, in their order."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one transaction."""

    events: Sequence[Row]
    receipts: Sequence[Row]
    """Latest receipt of each bundle."""
    ledger: Sequence[Row]
    lasts: tuple[int, int, int]
    """Number of the last row that each of these tables has had, with this batch; -1: none."""


class Database(Protocol):
    """A database with the tables, opened by one coordinator."""

    place: str
    """Name of the file or the server, for messages."""

    async def check(self) -> None:
        """Check what only the database itself knows, such as its indexes. Raises LocalError."""

    async def fetch(self, query: str, *values: Any) -> Sequence[Row]:
        """Return the rows of a query."""

    async def append(self, batch: Batch) -> None:
        """Write a batch in one durable transaction. Raises StoreConflict; then nothing is written."""

    async def save_snapshot(self, snapshot: Row, archived: Row | None, kept_from: int) -> None:
        """Replace the snapshot, and delete the events before its number, in one transaction.

        Add a row to the journal, if there is one, and delete those of chapters before `kept_from`.
        """

    async def set_closed(self, reason: str) -> None:
        """Set why no coordinator may use the store; empty if one may."""

    async def clear(self) -> None:
        """Delete all rows of the tables."""

    async def insert(self, table: str, rows: Sequence[Row]) -> None:
        """Insert rows into a table."""

    async def close(self) -> None:
        """Close the connections."""


async def info_of(database: Database) -> StoreInfo:
    """Return the row of `store_info`."""
    return StoreInfo(*(await database.fetch(READ_INFO))[0])


class SqlStore:
    """Implementation of ports.store.Store over a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._last_number = self._last_change = self._ledger_length = 0
        self._last_digest = ""

    @classmethod
    async def open(cls, database: Database) -> SqlStore:
        """Return the store of a database for its coordinator. Raises LocalError if none may use it, and closes the database."""
        try:
            if closed := (await info_of(database)).closed:
                raise LocalError(f"{database.place} is not in use: {closed}")
            return await cls.over(database)
        except BaseException:
            await database.close()
            raise

    @classmethod
    async def over(cls, database: Database) -> SqlStore:
        """Return the store of a database whose tables exist. Raises LocalError."""
        store = cls(database)
        await store.reload()
        return store

    async def reload(self) -> None:
        """Read how far the tables go, after another coordinator has written to them. Raises LocalError."""
        # Counting the lines would read all rows.
        query = (
            "SELECT (SELECT max(number) FROM events), (SELECT max(change) FROM receipts), (SELECT max(number) FROM ledger),"
            " (SELECT digest FROM events ORDER BY number DESC LIMIT 1)"
        )
        ((*lasts, digest),) = await self._database.fetch(query)
        if not all(last is None or isinstance(last, int) for last in lasts) or not isinstance(digest or "", str):
            raise damaged(self._database.place, "the last row of a table")
        number, change, line = lasts
        self._last_number, self._last_digest, self._last_change = number or 0, digest or "", change or 0
        self._ledger_length = 0 if line is None else line + 1

    async def check(self) -> None:
        """Read every row but the events, which are checked as they are restored. Raises LocalError for the first damaged one."""
        await self._database.check()
        latest = await self.latest_snapshot()
        if latest is not None and latest[0] > self._last_number:
            raise damaged(self._database.place, f"row {latest[0]} of events")
        async for _ in self._pages("receipts"):
            pass
        count = 0
        async for rows in self._pages("ledger"):
            for number, _line, _digest in rows:
                if number != count:
                    raise damaged(self._database.place, f"row {count} of ledger")
                count += 1

    async def append(
        self,
        events: Sequence[LoggedEvent],
        receipts: Sequence[StoredReceipt] = (),
        ledger: Sequence[str] = (),
    ) -> None:
        expected = range(self._last_number + 1, self._last_number + 1 + len(events))
        if [entry.number for entry in events] != list(expected):
            raise StoreConflict(f"the next event is {self._last_number + 1}")
        latest = {receipt.bundle: receipt for receipt in receipts}.values()
        number, length = self._last_number + len(events), self._ledger_length + len(ledger)
        change = self._last_change + len(latest)
        batch = Batch(
            chained(events, self._last_digest),
            [_receipt_row(number, one) for number, one in enumerate(latest, self._last_change + 1)],
            [sealed(number, line) for number, line in enumerate(ledger, self._ledger_length)],
            (number or -1, change or -1, length - 1),
        )
        await self._database.append(batch)
        self._last_number, self._last_change, self._ledger_length = number, change, length
        self._last_digest = batch.events[-1][-1] if events else self._last_digest

    async def events(self, *, after: int) -> AsyncIterator[LoggedEvent]:
        """Yield the events after a number. Raises LocalError for a damaged one."""
        # The event `after` begins the chain of digests. After a gap there is nothing to compare with: the caller finds it.
        last, previous = 0, ""
        async for rows in self._pages("events", first=after):
            for number, at_ms, payload, digest in rows:
                if number > after:
                    if number == last + 1 and digest != event_digest(previous, number, at_ms, payload):
                        raise damaged(self._database.place, f"row {number} of events")
                    yield LoggedEvent(number, at_ms, payload)
                last, previous = number, digest

    async def save_snapshot(
        self, number: int, payload: str, segment: Segment | None = None, *, kept_from: int = 0
    ) -> None:
        """Replace the snapshot, drop the events before its number, and archive a segment."""
        snapshot = await asyncio.to_thread(sealed, number, payload)
        archived = None if segment is None else await asyncio.to_thread(_journal_row, segment)
        await self._database.save_snapshot(snapshot, archived, kept_from)

    async def latest_snapshot(self) -> tuple[int, str] | None:
        """Return the number and payload of the snapshot, or None. Raises LocalError if it is damaged."""
        rows = await self._database.fetch("SELECT number, payload, digest FROM snapshots ORDER BY number DESC LIMIT 1")
        for row in rows:
            await asyncio.to_thread(require_intact, self._database.place, "snapshots", row)
        return (rows[0][0], rows[0][1]) if rows else None

    async def segments(self, *, after: int) -> AsyncIterator[Segment]:
        """Yield the segments after an event. Raises LocalError for a damaged one."""
        query = f"SELECT {', '.join(TABLES['journal'])} FROM journal WHERE number > $1 ORDER BY number LIMIT 1"
        while rows := await self._database.fetch(query, after):
            await asyncio.to_thread(require_intact, self._database.place, "journal", rows[0])
            last, first, chapter, at_ms, _, payload, _ = rows[0]
            yield Segment(first, last, chapter, at_ms, payload)
            after = last

    async def chapters(self) -> list[Chapter]:
        rows = await self._database.fetch(
            "SELECT chapter, max(number), max(at_ms), sum(CASE WHEN first = chapter THEN num_bytes ELSE 0 END),"
            " sum(num_bytes) FROM journal GROUP BY chapter ORDER BY chapter"
        )
        return [Chapter(first, last, at_ms, int(opening), int(total)) for first, last, at_ms, opening, total in rows]

    async def receipt(self, bundle: str) -> StoredReceipt | None:
        """Return the receipt of a bundle, or None. Raises LocalError if it is damaged."""
        query = f"SELECT {', '.join(TABLES['receipts'])} FROM receipts WHERE bundle = $1"
        rows = await self._database.fetch(query, bundle)
        return self._receipts(rows)[0] if rows else None

    async def receipts_of(
        self, worker: str | None, *, after: int, limit: int, chars_max: int = PAGE_CHARS_MAX
    ) -> tuple[list[StoredReceipt], int]:
        """Return a page of receipts and the number of the last change in it."""
        chosen, values = ("change > $3", ()) if worker is None else ("change > $3 AND worker = $4", (worker,))
        rows = await self._database.fetch(page_query("receipts", "envelope", chosen), chars_max, limit, after, *values)
        return self._receipts(rows), rows[-1][0] if rows else after

    async def ledger(self, *, start: int, limit: int, chars_max: int = PAGE_CHARS_MAX) -> list[str]:
        """Return a page of ledger lines. Raises LocalError for a damaged one."""
        rows = await self._database.fetch(page_query("ledger", "line", "number >= $3"), chars_max, limit, start)
        for row in rows:
            require_intact(self._database.place, "ledger", row)
        return [line for _, line, _ in rows]

    def _receipts(self, rows: Sequence[Row]) -> list[StoredReceipt]:
        for row in rows:
            require_intact(self._database.place, "receipts", row)
        return [StoredReceipt(*row[1:-1]) for row in rows]

    async def _pages(self, table: str, *, first: int = 0) -> AsyncIterator[Sequence[Row]]:
        """Yield the rows of a table from a number on, in order, and check them unless their digests are chained."""
        columns = TABLES[table]
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE {columns[0]} >= $1 ORDER BY {columns[0]} LIMIT $2"
        while True:
            rows = await self._database.fetch(query, first, ROWS_MAX)
            for row in rows:
                if not isinstance(row[0], int):
                    raise damaged(self._database.place, f"a row of {table}")
                if table != CHAINED:
                    require_intact(self._database.place, table, row)
            yield rows
            if len(rows) < ROWS_MAX:
                return
            first = rows[-1][0] + 1

    async def ledger_length(self) -> int:
        return self._ledger_length

    async def close(self) -> None:
        """Close the connections to the database."""
        await self._database.close()


def _receipt_row(change: int, one: StoredReceipt) -> Row:
    return sealed(change, one.bundle, one.lease_id, one.worker, one.step, str(one.status), one.envelope)


def _journal_row(segment: Segment) -> Row:
    return sealed(segment.last, segment.first, segment.chapter, segment.at_ms, len(segment.payload), segment.payload)


def page_query(table: str, text: str, chosen: str) -> str:
    """Return the query of the first rows: at most $2, as many as have $1 characters of text together, at least one."""
    columns = TABLES[table]
    order, listed = columns[0], ", ".join(columns)
    return (
        f"SELECT {listed} FROM (SELECT *, length({text}) AS size, sum(length({text})) OVER (ORDER BY {order}) AS through"
        f" FROM (SELECT {listed} FROM {table} WHERE {chosen} ORDER BY {order} LIMIT $2) AS first) AS summed"
        f" WHERE through <= $1 OR through = size ORDER BY {order}"
    )
