"""The store in PostgreSQL, one database for each run.

One connection writes: `append` is one call of a function in the database, so one round trip and one commit. A pool reads, and
writes what need not wait for events: one of its connections is never with a reader.

Two coordinators never write to one database. One leads for a term, which it renews (postgres_leader.py). Each term has a greater
epoch, and every write requires the present one. So a coordinator that lost its term without its notice writes nothing after
another one has begun.

The password comes from PGPASSWORD, ~/.pgpass or a service file, as for psql.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import asyncpg

from prime_node.adapters.storage.postgres_leader import TERM_SECONDS, TermKeeper
from prime_node.adapters.storage.row_digests import SEALED, SEALED_SINCE, seals_of
from prime_node.adapters.storage.schema_versions import (
    CREATE_INFO,
    READ_INFO,
    StoreInfo,
    migrations_after,
    require_run,
)
from prime_node.adapters.storage.sql_store import TABLES, Batch, Row, SqlStore, info_of
from prime_node.ports.leadership import TermLost
from prime_node.ports.store import StoreConflict
from prime_protocol.errors import LocalError, TransientFault

LOCK = 0x7072696D65  # "prime"
"""Key of the advisory lock of the coordinator that makes or upgrades the tables."""
KEEPALIVE_SECONDS = 10
CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 10.0
ANSWER_SECONDS = 60.0
"""Time for one write or one page of rows. The coordinator ends after it, for nothing that peers send is durable."""
PAGE_BYTES = 2**24
"""Bytes of documents that are read at once: bundles that prove a ban are among them."""
PORT_MAX = 65_535
READERS_MAX = 3
FENCED = "PR001"
"""SQLSTATE of a write in an older epoch (schema/postgres/0001.sql)."""
SESSION = {
    "application_name": "prime-node coordinator",
    "idle_in_transaction_session_timeout": "30s",  # a leader that is stopped within one would keep all others from taking over
    "statement_timeout": "0",  # ANSWER_SECONDS bounds each, whatever the server's default
    "tcp_keepalives_idle": str(KEEPALIVE_SECONDS // 2),
    "tcp_keepalives_interval": "1",
    "tcp_keepalives_count": str(KEEPALIVE_SECONDS // 2),
}
_PLACE = re.compile(r"(?:\[[^\]]*\]|[^:\[\]]*)(?::([0-9]{0,5}))?")
"""A host with or without a port."""
_T = TypeVar("_T")

log = logging.getLogger(__name__)


async def postgres_database(url: str, *, run: str) -> PostgresDatabase:
    """Open the database of one run for writing, also one that no coordinator may use, and begin a term. Raises LocalError."""
    database = await follow_postgres(url, run=run)
    try:
        await database.lead(is_patient=False)
        return database
    except BaseException:
        await database.close()
        raise


async def follow_postgres(url: str, *, run: str, term_s: float = TERM_SECONDS) -> PostgresDatabase:
    """Open the database of one run, and make or upgrade its tables. It is read until `lead` returns. Raises LocalError.

    A database without tables becomes that of `run`.
    """
    place = shown_place(url)
    maker = await _asked(_connected(url), place)
    try:
        await _asked(_migrate(maker, run, place), place)
    finally:
        await maker.close()
    return PostgresDatabase(url, await _asked(_pool(url), place), place=place, term_s=term_s)


async def read_postgres(url: str, *, run: str) -> SqlStore:
    """Open the database of a run for reading, also while its coordinator writes. Raises LocalError."""
    place = shown_place(url)
    pool = await _asked(_pool(url), place)
    try:
        database = PostgresDatabase(url, pool, place=place)
        if (await database.fetch("SELECT to_regclass('store_info')::text"))[0][0] is None:
            raise LocalError(f"{place} holds no run: the coordinator has not run yet")
        info = await info_of(database)
        require_run(info, run, place=place)
        if migrations_after("postgres", info.version, place=place):
            raise LocalError(f"{place} has the tables of an older release: start the coordinator, which updates them")
        return await SqlStore.over(database)
    except BaseException:
        await pool.close()
        raise


class TermEnded(StoreConflict, TermLost):
    """The database refused a write in an older epoch."""


class PostgresDatabase:
    """Implementation of sql_store.Database. It is only read before `lead`."""

    def __init__(self, url: str, pool: asyncpg.Pool, *, place: str, term_s: float = TERM_SECONDS) -> None:
        self.place = place
        """Name of the database, for messages."""
        self._url, self._pool, self._term_s = url, pool, term_s
        self._writer: asyncpg.Connection | None = None
        self._reading = asyncio.Semaphore(READERS_MAX)
        """Places of readers, which leave a connection for a write. A read has its place until the connection is free again."""
        self.keeper: TermKeeper | None = None
        """Thread that keeps the term; None before `lead`."""

    async def lead(self, *, is_patient: bool) -> None:
        """Begin a term, and connect to write. Raises LocalError.

        While another coordinator leads, wait if `is_patient`, else raise.
        """
        self.keeper = TermKeeper(lambda: _connected(self._url), term_s=self._term_s, place=self.place)
        await self.keeper.begun(is_patient=is_patient)
        self._writer = await _asked(_connected(self._url), self.place)
        if (await self.fetch("SHOW fsync"))[0][0] == "off":
            log.warning("%s has fsync off: a power loss may lose what workers were promised", self.place)

    async def fetch(self, query: str, *values: Any) -> Sequence[Row]:
        """Return the rows of a query. The wait for a place is a part of its time."""
        return await _asked(_in_time(self._read(query, *values)), self.place)

    async def _read(self, query: str, *values: Any) -> Sequence[Row]:
        async with self._reading:
            rows: Sequence[Row] = await self._pool.fetch(query, *values)
            return rows

    async def append(self, batch: Batch) -> None:
        """Write a batch. Raises StoreConflict, also if another coordinator has taken over."""
        await self._call(
            "SELECT append_events($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
            *_columns("events", batch.events),
            *_columns("receipts", batch.receipts),
            *_columns("ledger", batch.ledger),
        )

    async def check(self) -> None:
        """Do nothing: the server checks its own files."""

    async def save_snapshot(self, snapshot: Row, archived: Row | None, kept_from: int) -> None:
        """Replace the snapshot, delete the events before its number, and archive a segment.

        Another connection than that of `append` does it.
        """
        values = (*snapshot, kept_from, *(archived or [None] * len(TABLES["journal"])))
        query = "SELECT save_snapshot($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)"
        await self._call(query, *values, by=self._pool)

    async def set_closed(self, reason: str) -> None:
        """Set why no coordinator may use the store."""
        assert self._writer is not None
        async with self._fenced(self._writer):
            await _asked(self._writer.execute("UPDATE store_info SET closed = $1", reason), self.place)

    async def clear(self) -> None:
        """Delete all rows of the tables."""
        assert self._writer is not None
        async with self._fenced(self._writer):
            await _asked(self._writer.execute(f"TRUNCATE documents, {', '.join(TABLES)}"), self.place)

    async def insert(self, table: str, rows: Sequence[Row]) -> None:
        """Insert rows into a table."""
        assert self._writer is not None
        async with self._fenced(self._writer):
            copied = self._writer.copy_records_to_table(table, records=rows, columns=TABLES[table])
            await _asked(copied, self.place)

    async def write_document(self, room: str, name: str, data: bytes) -> int:
        """Store or replace a document, and return the number of this change. Raises StoreConflict."""
        ((change,),) = await self._call("SELECT write_document($1, $2, $3, $4)", room, name, data, by=self._pool)
        return int(change)

    async def write_first_documents(self, found: AsyncIterable[tuple[str, str, bytes]]) -> None:
        """Store all documents (room, name, data) in one transaction, so that an empty table stays empty if it does not end."""
        assert self._writer is not None
        async with self._fenced(self._writer):
            async for document in found:
                await self._call("SELECT write_document($1, $2, $3, $4)", *document)

    async def documents(self, *, after: int, limit: int) -> Sequence[Row]:
        """Return (change, room, name, data) of the documents that were written after a change, in order.

        They have PAGE_BYTES together, or there is one.
        """
        query = (
            "SELECT change, room, name, data FROM (SELECT *, sum(octet_length(data)) OVER (ORDER BY change) AS through"
            " FROM (SELECT * FROM documents WHERE change > $1 ORDER BY change LIMIT $2) AS first) AS summed"
            " WHERE through <= $3 OR through = octet_length(data) ORDER BY change"
        )
        return await self.fetch(query, after, limit, PAGE_BYTES)

    async def close(self) -> None:
        """Close the connections and end the term."""
        with contextlib.suppress(TimeoutError):  # a server without this connection ends the lock itself
            if self._writer is not None:
                await self._writer.close(timeout=CLOSE_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._pool.close()
        if self.keeper is not None:  # last: no other coordinator could write until here
            await self.keeper.end()

    @contextlib.asynccontextmanager
    async def _fenced(self, writer: asyncpg.Connection) -> AsyncIterator[None]:
        """Open a transaction in which no other coordinator begins a term."""
        async with writer.transaction():
            await self._call("SELECT require_epoch($1)")
            yield

    async def _call(self, query: str, *values: Any, by: asyncpg.Pool | None = None) -> Sequence[Row]:
        assert self._writer is not None, "the store is only read"
        assert self.keeper is not None
        try:
            rows: Sequence[Row] = await _asked(
                _in_time((by or self._writer).fetch(query, self.keeper.epoch, *values)), self.place
            )
            return rows
        except asyncpg.PostgresError as error:
            if error.sqlstate == FENCED:
                raise TermEnded(f"{self.place}: {error}") from error
            if isinstance(error, asyncpg.IntegrityConstraintViolationError):
                raise StoreConflict(f"{self.place}: {error}; stop one of the coordinators") from error
            raise TransientFault(
                f"{self.place} cannot be written ({error}): check the server, then start the coordinator again"
            ) from error


def shown_place(url: str) -> str:
    """Return the database's name for messages: no user, no password. Raises LocalError if it can be no database's URL."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise LocalError(f"coordinator.store names no database that can be used: {error}") from None
    hosts = parts.netloc.rpartition("@")[2]
    if not all(map(_is_place, hosts.split(","))):  # not shown: it may be a part of a password
        raise LocalError(
            f"coordinator.store names no database that can be used: a port is no number up to {PORT_MAX}. Write HOST:PORT "
            "after the user, and each of / : @ in a password as %2F %3A %40"
        )
    return f"postgresql://{hosts}{parts.path}"


def _is_place(text: str) -> bool:
    found = _PLACE.fullmatch(text)
    return found is not None and int(found[1] or 0) <= PORT_MAX


async def _in_time(query: Awaitable[_T]) -> _T:
    """Return what a query returns. Raises TimeoutError after ANSWER_SECONDS, also if it does not end when cancelled."""
    task = asyncio.ensure_future(query)
    try:
        done, _ = await asyncio.wait({task}, timeout=ANSWER_SECONDS)
        if not done:
            raise TimeoutError(f"no answer in {ANSWER_SECONDS:.0f} s")
        return task.result()
    finally:
        task.cancel()


async def _connected(url: str) -> asyncpg.Connection:
    made = await asyncpg.connect(url, timeout=CONNECT_SECONDS, server_settings=SESSION)
    await _settle(made)
    return made


async def _settle(made: asyncpg.Connection) -> None:
    """Commit durably in this session, whatever the server's default, and without its own time limits.

    Waits for standbys stay as the server has them.
    """
    if made.get_server_version() >= (14,):
        await made.execute("SET idle_session_timeout = 0")  # a coordinator without work keeps its connection
    if await made.fetchval("SHOW synchronous_commit") == "off":
        await made.execute("SET synchronous_commit = on")


async def _stay_settled(made: asyncpg.Connection) -> None:
    """Reset nothing when a connection returns to the pool: no query leaves anything else in its session."""


async def _migrate(maker: asyncpg.Connection, run: str, place: str) -> None:
    """Bring the tables to the version of this release. Raises LocalError for another run's."""
    async with maker.transaction():
        await maker.execute("SELECT pg_advisory_xact_lock($1)", LOCK)
        await maker.execute(CREATE_INFO)
        if await maker.fetchval("SELECT count(*) FROM store_info") == 0:
            await maker.execute("INSERT INTO store_info (version, run) VALUES (0, $1)", run)
        info = StoreInfo(*(await maker.fetchrow(READ_INFO)))
        require_run(info, run, place=place)
        for number, script in migrations_after("postgres", info.version, place=place):
            await maker.execute(script)
            if number == SEALED_SINCE:
                await _seal(maker)
            await maker.execute("UPDATE store_info SET version = $1", number)


async def _seal(writer: asyncpg.Connection) -> None:
    """Give the rows of an older release their digests."""
    for table in SEALED:
        key, *others, _ = TABLES[table]
        rows = await writer.fetch(f"SELECT {', '.join((key, *others))} FROM {table} ORDER BY {key}")
        await writer.executemany(f"UPDATE {table} SET digest = $1 WHERE {key} = $2", seals_of(table, rows))


def _columns(table: str, rows: Sequence[Row]) -> list[Any]:
    """Return the number of the first of consecutive rows, and the values of each further column."""
    further = list(zip(*rows, strict=True))[1:] or [()] * (len(TABLES[table]) - 1)
    return [rows[0][0] if rows else 0, *further]


async def _pool(url: str) -> asyncpg.Pool:
    return await asyncpg.create_pool(
        url,
        min_size=1,
        max_size=READERS_MAX + 1,
        timeout=CONNECT_SECONDS,
        server_settings=SESSION,
        init=_settle,
        reset=_stay_settled,
    )


async def _asked(question: Awaitable[_T], place: str) -> _T:
    """Return what the server answers. Raises LocalError for a fault that an operator can fix, TransientFault if it may pass."""
    try:
        return await question
    except asyncpg.InvalidAuthorizationSpecificationError as error:  # a wrong password is one
        advice = "set PGPASSWORD, or write ~/.pgpass or a service file"
        raise LocalError(f"{place} refuses this user ({error}): {advice}") from None
    except asyncpg.InvalidCatalogNameError as error:
        raise LocalError(f"{place} does not exist ({error}): make it with createdb") from None
    except asyncpg.InsufficientPrivilegeError as error:
        raise LocalError(
            f"{place} does not let this user make tables ({error}): let the user own the database"
        ) from None
    except asyncpg.CannotConnectNowError as error:
        raise TransientFault(
            f"{place} accepts no connections now ({error}): start the coordinator again later"
        ) from None
    except (asyncpg.ClientConfigurationError, ValueError) as error:
        raise LocalError(f"coordinator.store names no database that can be used: {error}") from None
    except (
        OSError,
        asyncpg.PostgresConnectionError,
        asyncpg.InterfaceError,
        asyncpg.InternalClientError,  # none of several hosts takes writes, during a failover
        asyncpg.AdminShutdownError,
    ) as error:
        reason = str(error) or type(error).__name__
        raise TransientFault(
            f"{place} cannot be reached ({reason}): check the server, then start the coordinator again"
        ) from None
    except asyncpg.InsufficientResourcesError as error:
        raise TransientFault(
            f"{place} has no room ({error}): check the server, then start the coordinator again"
        ) from None
