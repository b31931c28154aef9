"""The store in SQLite (WAL), through SQLAlchemy, so that PostgreSQL needs only another URL.

One connection writes, so transactions are serial. `synchronous=FULL` makes each commit survive power loss. The statements are
plain SQL that every database knows: a receipt is replaced by delete and insert, not by a dialect's upsert.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    BigInteger,
    Column,
    ColumnElement,
    Index,
    MetaData,
    Select,
    String,
    Table,
    Text,
    delete,
    event,
    func,
    insert,
    select,
)
from sqlalchemy.exc import DatabaseError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from prime_node.ports.store import PAGE_CHARS_MAX, LoggedEvent, StoreConflict, StoredReceipt
from prime_protocol.errors import LocalError

_METADATA = MetaData()
_EVENTS = Table(
    "events",
    _METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("at_ms", BigInteger, nullable=False),
    Column("payload", Text, nullable=False),
)
_SNAPSHOTS = Table(
    "snapshots",
    _METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("payload", Text, nullable=False),
)
_RECEIPTS = Table(
    "receipts",
    _METADATA,
    Column("bundle", String(64), primary_key=True),
    Column("lease_id", String(64), nullable=False, unique=True),
    Column("worker", String(64), nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("status", String(16), nullable=False),
    Column("envelope", Text, nullable=False),
    Column("change", BigInteger, nullable=False, unique=True),
    Index("receipts_by_worker", "worker", "change"),
)
_LEDGER = Table(
    "ledger",
    _METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("line", Text, nullable=False),
)
_ROWS_MAX = 500
"""Rows read from the log at once."""


class SqlStore:
    """Implementation of ports.store.Store. Made by `open_sqlite` or, for another database, by `open_url`."""

    def __init__(self, engine: AsyncEngine, *, last_number: int, last_change: int, ledger_length: int) -> None:
        self._engine = engine
        self._last_number = last_number
        self._last_change = last_change
        self._ledger_length = ledger_length

    async def append(
        self,
        events: Sequence[LoggedEvent],
        receipts: Sequence[StoredReceipt] = (),
        ledger: Sequence[str] = (),
    ) -> None:
        """Append events, receipts and ledger lines in one transaction. Raises StoreConflict."""
        expected = range(self._last_number + 1, self._last_number + 1 + len(events))
        if [entry.number for entry in events] != list(expected):
            raise StoreConflict(f"the next event is {self._last_number + 1}")
        event_rows = [{"number": e.number, "at_ms": e.at_ms, "payload": e.payload} for e in events]
        latest = list({receipt.bundle: receipt for receipt in receipts}.values())
        receipt_rows = [
            {**_row(receipt), "change": change} for change, receipt in enumerate(latest, self._last_change + 1)
        ]
        ledger_rows = [{"number": number, "line": line} for number, line in enumerate(ledger, self._ledger_length)]
        try:
            async with self._engine.begin() as connection:
                last = (await connection.execute(select(func.max(_EVENTS.c.number)))).scalar() or 0
                if last != self._last_number:
                    raise StoreConflict(f"another coordinator wrote event {last}; stop one of them")
                if event_rows:
                    await connection.execute(insert(_EVENTS), event_rows)
                if receipt_rows:
                    bundles = [receipt.bundle for receipt in latest]
                    await connection.execute(delete(_RECEIPTS).where(_RECEIPTS.c.bundle.in_(bundles)))
                    await connection.execute(insert(_RECEIPTS), receipt_rows)
                if ledger_rows:
                    await connection.execute(insert(_LEDGER), ledger_rows)
        except IntegrityError as error:
            raise StoreConflict(str(error.orig)) from error
        self._last_number += len(event_rows)
        self._last_change += len(receipt_rows)
        self._ledger_length += len(ledger_rows)

    async def events(self, *, after: int) -> AsyncIterator[LoggedEvent]:
        """Yield the events after a number."""
        while True:
            query = select(_EVENTS).where(_EVENTS.c.number > after).order_by(_EVENTS.c.number).limit(_ROWS_MAX)
            async with self._engine.connect() as connection:
                rows = (await connection.execute(query)).all()
            for row in rows:
                yield LoggedEvent(row.number, row.at_ms, row.payload)
            if len(rows) < _ROWS_MAX:
                return
            after = rows[-1].number

    async def save_snapshot(self, number: int, payload: str) -> None:
        """Replace the snapshot, and drop the events before its number."""
        async with self._engine.begin() as connection:
            await connection.execute(delete(_SNAPSHOTS))
            await connection.execute(insert(_SNAPSHOTS), [{"number": number, "payload": payload}])
            # The last event stays: its number tells `append` whether another process wrote.
            await connection.execute(delete(_EVENTS).where(_EVENTS.c.number < number))

    async def latest_snapshot(self) -> tuple[int, str] | None:
        """Return the number and payload of the snapshot, or None."""
        query = select(_SNAPSHOTS).order_by(_SNAPSHOTS.c.number.desc()).limit(1)
        async with self._engine.connect() as connection:
            row = (await connection.execute(query)).first()
        return None if row is None else (row.number, row.payload)

    async def receipt(self, bundle: str) -> StoredReceipt | None:
        """Return the receipt of a bundle, or None."""
        async with self._engine.connect() as connection:
            row = (await connection.execute(select(_RECEIPTS).where(_RECEIPTS.c.bundle == bundle))).first()
        return None if row is None else _receipt(row)

    async def receipts_of(
        self, worker: str | None, *, after: int, limit: int, chars_max: int = PAGE_CHARS_MAX
    ) -> tuple[list[StoredReceipt], int]:
        """Return a page of receipts and the number of the last change in it."""
        chosen = _RECEIPTS.c.change > after
        if worker is not None:
            chosen &= _RECEIPTS.c.worker == worker
        query = _page(_RECEIPTS, chosen, _RECEIPTS.c.change, _RECEIPTS.c.envelope, limit=limit, chars_max=chars_max)
        async with self._engine.connect() as connection:
            rows = (await connection.execute(query)).all()
        return [_receipt(row) for row in rows], rows[-1].change if rows else after

    async def ledger(self, *, start: int, limit: int, chars_max: int = PAGE_CHARS_MAX) -> list[str]:
        """Return a page of ledger lines."""
        query = _page(
            _LEDGER, _LEDGER.c.number >= start, _LEDGER.c.number, _LEDGER.c.line, limit=limit, chars_max=chars_max
        )
        async with self._engine.connect() as connection:
            return [row.line for row in (await connection.execute(query)).all()]

    async def ledger_length(self) -> int:
        """Return the number of ledger lines."""
        return self._ledger_length

    async def close(self) -> None:
        """Close the connections to the database."""
        await self._engine.dispose()


async def open_sqlite(path: Path) -> SqlStore:
    """Open or create the database of one coordinator. Raises LocalError if it is damaged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return await open_url(URL.create("sqlite+aiosqlite", database=str(path)))
    except DatabaseError as error:
        raise LocalError(f"{path} cannot be used ({error.orig}): put back a copy of the run's folder") from None


async def open_url(url: str | URL) -> SqlStore:
    """Open any database that SQLAlchemy supports asynchronously."""
    engine = create_async_engine(url)
    if engine.dialect.name == "sqlite":
        event.listen(engine.sync_engine, "connect", _configure_sqlite)
    async with engine.begin() as connection:
        await connection.run_sync(_METADATA.create_all)
        number = (await connection.execute(select(func.max(_EVENTS.c.number)))).scalar()
        change = (await connection.execute(select(func.max(_RECEIPTS.c.change)))).scalar()
        line = (await connection.execute(select(func.max(_LEDGER.c.number)))).scalar()  # counting would read them all
    length = 0 if line is None else line + 1
    return SqlStore(engine, last_number=number or 0, last_change=change or 0, ledger_length=length)


def _configure_sqlite(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=5000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _page(
    table: Table, chosen: ColumnElement[bool], order: Column[int], text: Column[str], *, limit: int, chars_max: int
) -> Select[Any]:
    """Return the first rows: as many as have `chars_max` characters of text together, at least one."""
    first = select(table).where(chosen).order_by(order).limit(limit).subquery()
    size = func.length(first.c[text.name])
    through = func.sum(size).over(order_by=first.c[order.name]).label("through")
    summed = select(first, size.label("size"), through).subquery()
    fits = (summed.c.through <= chars_max) | (summed.c.through == summed.c.size)
    return select(summed).where(fits).order_by(summed.c[order.name])


def _row(receipt: StoredReceipt) -> dict[str, str | int]:
    return {
        "bundle": receipt.bundle,
        "lease_id": receipt.lease_id,
        "worker": receipt.worker,
        "step": receipt.step,
        "status": str(receipt.status),
        "envelope": receipt.envelope,
    }


def _receipt(row: Any) -> StoredReceipt:
    return StoredReceipt(row.bundle, row.lease_id, row.worker, row.step, row.status, row.envelope)
