"""The store in a file of SQLite (WAL).

One connection writes, in a thread of its own, so transactions are serial; another one reads at the same time. `synchronous=FULL`
makes each commit survive power loss.

SQLite drops what follows a damaged frame of the WAL without an error. So a file next to the database, `*-tail`, holds the numbers
of the last rows. It is written after each commit, without a sync: a kill leaves it whole, and a power loss perhaps an older one.

SQLite also writes to a file that another program has removed, and a restart has none of these rows. Where only the database is
missing, it removes the WAL, with all that this holds. So both are looked for, at the start and after each commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from prime_node.adapters.storage.row_digests import SEALED, SEALED_SINCE, damaged, row_digest, seals_of
from prime_node.adapters.storage.schema_versions import (
    CREATE_INFO,
    READ_INFO,
    StoreInfo,
    migrations_after,
    require_run,
)
from prime_node.adapters.storage.sql_store import TABLES, Batch, Row, SqlStore
from prime_node.files import DISK_FAULTS, PASSING_FAULTS, sync
from prime_node.inside import naming, read_regular
from prime_node.ports.store import StoreConflict
from prime_protocol.errors import LocalError, TransientFault
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_COLUMNS = {"store_info": {"version", "run", "closed"}, **{name: set(columns) for name, columns in TABLES.items()}}
_INSERT = {
    table: f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
    for table, columns in TABLES.items()
}
_REPLACING = " ON CONFLICT (bundle) DO UPDATE SET " + ", ".join(f"{one} = excluded.{one}" for one in TABLES["receipts"])
"""End of a statement that replaces the receipt of a bundle."""
_OF_SQLITE = ("sqlite_stat1", "sqlite_stat4")
"""Tables that ANALYZE makes."""
_HIDDEN = 6
"""Place, in a row of PRAGMA table_xinfo, of a number that is not 0 for a computed column."""
_TAIL_TABLES = ("events", "receipts", "ledger")
_TAIL_BYTES_MAX = 96
_PRIMARY = 0xFF
"""Bits of an error code of SQLite without its details."""
_OF_DISK = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_IOERR,
)
"""Errors that say nothing about the file's content."""
_SHM_BYTES = 2**15
"""Bytes of a new `*-shm`; without room for them, SQLite says that the disk cannot be read or written."""
_FILES = 6
"""Descriptors of two connections: the database, its `-wal` and its `-shm`."""
_INDEX = re.compile(r"CREATE (UNIQUE )?INDEX (IF NOT EXISTS )?\w+ ON \w+ \(\w+(, \w+)*\)")
"""An index of columns alone."""


async def open_sqlite(path: Path, *, run: str) -> SqlStore:
    """Open or create the database of one run's coordinator. Raises LocalError if it is damaged or another run's."""
    return await SqlStore.open(await sqlite_database(path, run=run))


async def sqlite_database(path: Path, *, run: str) -> SqliteDatabase:
    """Open or create the database of one run, also one that no coordinator may use. Raises LocalError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        database = await asyncio.to_thread(SqliteDatabase, path)
        try:
            await database.require_plain_tables()
            require_run(await database.migrate(run), run, place=str(path))
            return database
        except BaseException:
            await database.close()
            raise
    except sqlite3.DatabaseError as error:
        raise _unusable(path, error) from None


class SqliteDatabase:
    """Implementation of sql_store.Database."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self._path = path
        self._wal, self._tail = (path.with_name(f"{path.name}{end}") for end in ("-wal", "-tail"))
        left = [str(file) for file in (self._wal, self._tail) if file.exists()]
        if left and not (path.exists() and path.stat().st_size):
            raise LocalError(
                f"{path} is missing or empty, but not {' and '.join(left)}: put back a copy of the run's folder"
            )
        self._files = (0, 0)
        """Inodes of the open files."""
        self._writer, self._reader = _connect(path), _connect(path)
        self._writing, self._reading = (ThreadPoolExecutor(1, thread_name_prefix="sqlite") for _ in range(2))

    async def require_plain_tables(self) -> None:
        """Check that the file has nothing but our tables, with plain columns, and indexes of columns. Raises LocalError.

        A stranger's file may compute what is read from it: by a view that never ends, or by a column of gigabytes.
        """
        for kind, name, sql in await self.fetch("SELECT type, name, sql FROM sqlite_schema"):
            is_plain = sql is None or name in _OF_SQLITE
            if kind == "table" and name in _COLUMNS:
                columns = await self.fetch(f"PRAGMA table_xinfo({name})")
                names = {column[1] for column in columns}
                is_plain = names == _COLUMNS[name] or names == _COLUMNS[name] - {"digest"}  # before the migration
                is_plain = (
                    is_plain and sql.startswith("CREATE TABLE") and not any(column[_HIDDEN] for column in columns)
                )
            elif kind == "index" and sql is not None:
                is_plain = _INDEX.fullmatch(" ".join(sql.split())) is not None
            if not is_plain:
                raise LocalError(
                    f"{self._path} has a {kind} {printable(name, 60)!r} that no coordinator of this release makes: put back a "
                    "copy of the run's folder, or install the release that wrote it"
                )

    async def migrate(self, run: str) -> StoreInfo:
        """Bring the tables to the version of this release. A new database becomes that of `run`."""
        info: StoreInfo = await self._write(self._transact, self._migrate, run)
        self._files = self._inodes()
        return info

    async def fetch(self, query: str, *values: Any) -> Sequence[Row]:
        """Return the rows of a query. Raises LocalError, for example for a damaged page."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._reading, _fetch, self._reader, query, values)
        except sqlite3.DatabaseError as error:
            raise _unusable(self._path, error) from error

    async def check(self) -> None:
        """Compare tables with indexes and with the tail. Makes damaged indexes again from their rows. Raises LocalError."""
        if faults := await self._faults():
            await self._write_or_tell(self._transact, self._writer.execute, "REINDEX")
            if await self._faults():
                raise damaged(self.place, f"its structure ({faults[0]})")
            log.warning("%s: an index was damaged (%s) and is made again", self._path, faults[0])
        lasts = [f"(SELECT coalesce(max({TABLES[table][0]}), -1) FROM {table})" for table in _TAIL_TABLES]
        (found,) = await self.fetch(f"SELECT {', '.join(lasts)}")
        tail = await asyncio.to_thread(self._read_tail)
        if isinstance(tail, str):
            if max(found) >= 0:
                log.warning(
                    "%s is %s, so lost rows at the end are not noticed this time; it is written again", self._tail, tail
                )
            return
        for table, last, known in zip(_TAIL_TABLES, found, tail, strict=True):
            if last < known:
                raise LocalError(
                    f"{self.place} lacks rows {last + 1} to {known} of {table}, which it had: the file or its -wal is damaged, "
                    f"or an older copy. Put back a newer copy; to continue without these rows, remove {self._tail}"
                )

    async def append(self, batch: Batch) -> None:
        """Write a batch. Raises StoreConflict, also if another process has written since."""
        await self._write_or_tell(self._append, batch)

    async def save_snapshot(self, snapshot: Row, archived: Row | None, kept_from: int) -> None:
        await self._write_or_tell(self._transact, self._save_snapshot, snapshot, archived, kept_from)

    async def set_closed(self, reason: str) -> None:
        """Set why no coordinator may use the store."""
        await self._write_or_tell(self._transact, self._writer.execute, "UPDATE store_info SET closed = ?", (reason,))

    async def clear(self) -> None:
        """Delete all rows of the tables."""
        self._tail.unlink(missing_ok=True)
        for table in TABLES:
            await self._write_or_tell(self._transact, self._writer.execute, f"DELETE FROM {table}")

    async def insert(self, table: str, rows: Sequence[Row]) -> None:
        """Insert rows into a table."""
        await self._write_or_tell(self._transact, self._writer.executemany, _INSERT[table], rows)

    async def close(self) -> None:
        """Close both connections."""
        for executor, connection in ((self._reading, self._reader), (self._writing, self._writer)):
            await asyncio.get_running_loop().run_in_executor(executor, connection.close)
            executor.shutdown()

    async def _write_or_tell(self, work: Callable[..., object], *values: Any) -> None:
        try:
            await self._write(work, *values)
        except sqlite3.IntegrityError as error:
            raise StoreConflict(f"{self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise _unwritable(self._path, error) from error

    async def _write(self, work: Callable[..., _T], *values: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._writing, work, *values)

    def _transact(self, work: Callable[..., _T], *values: Any) -> _T:
        self._writer.execute("BEGIN IMMEDIATE")
        try:
            result = work(*values)
        except BaseException:
            if self._writer.in_transaction:  # SQLite itself rolls back after some errors
                self._writer.execute("ROLLBACK")
            raise
        self._writer.execute("COMMIT")
        return result

    def _migrate(self, run: str) -> StoreInfo:
        self._writer.execute(CREATE_INFO)
        if not _fetch(self._writer, READ_INFO, ()):
            self._writer.execute("INSERT INTO store_info (version, run) VALUES (0, ?)", (run,))
        info = StoreInfo(*_fetch(self._writer, READ_INFO, ())[0])
        for number, script in migrations_after("sqlite", info.version, place=str(self._path)):
            for statement in _statements(script):
                self._writer.execute(statement)
            if number == SEALED_SINCE:
                self._seal()
            self._writer.execute("UPDATE store_info SET version = ?", (number,))
        return info

    def _seal(self) -> None:
        """Give the rows of an older release their digests."""
        for table in SEALED:
            key, *others, _ = TABLES[table]
            rows = _fetch(self._writer, f"SELECT {', '.join((key, *others))} FROM {table} ORDER BY {key}", ())
            self._writer.executemany(f"UPDATE {table} SET digest = ? WHERE {key} = ?", seals_of(table, rows))

    async def _faults(self) -> list[str]:
        return [row[0] for row in await self.fetch("PRAGMA integrity_check(1)") if row[0] != "ok"]

    def _read_tail(self) -> tuple[int, ...] | str:
        """Return the last event, change and ledger line that were written, or what is wrong with the file."""
        try:
            *numbers, digest = read_regular(self._tail)[:_TAIL_BYTES_MAX].decode("ascii").split()
            if len(numbers) == len(_TAIL_TABLES) and digest == row_digest(*numbers):
                return tuple(map(int, numbers))
        except FileNotFoundError:
            return "missing"
        except (UnicodeDecodeError, ValueError):
            pass
        return "damaged"

    def _write_tail(self, *numbers: int) -> None:
        line = " ".join(map(str, (*numbers, row_digest(*numbers))))
        descriptor = os.open(self._tail, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            with naming(self._tail):
                os.pwrite(descriptor, f"{line:<{_TAIL_BYTES_MAX - 1}}\n".encode(), 0)
        finally:
            os.close(descriptor)

    def _inodes(self) -> tuple[int, int]:
        return _inode(self._path), _inode(self._wal)

    def _require_in_place(self) -> None:
        """Check that the open files still have their names. Otherwise write down what they hold, and raise LocalError."""
        if (found := self._inodes()) == self._files:
            return
        saved = self._path.with_name(f"{self._path.name}-saved")
        try:
            saved.parent.mkdir(parents=True, exist_ok=True)
            saved.unlink(missing_ok=True)
            with contextlib.closing(sqlite3.connect(saved)) as copy:
                self._writer.backup(copy)
            sync(saved)
            if found[0] not in (0, self._files[0]):
                raise LocalError(
                    f"another file was put in the place of {self._path} while this coordinator used it. What it used is in "
                    f"{saved}: keep the right one under the first name, then start again"
                )
            for file in (self._wal, self._path.with_name(f"{self._path.name}-shm")):
                file.unlink(missing_ok=True)  # of the removed file: SQLite would write it into the new one
            saved.replace(self._path)
            sync(self._path.parent)
        except sqlite3.Error as error:
            raise _unwritable(saved, error) from error
        raise TransientFault(
            f"{self._path} or its -wal was removed while this coordinator used it; it is written again with all that it held: "
            "start again"
        )

    def _append(self, batch: Batch) -> None:
        """Write a batch and the tail: one visit of the thread for both."""
        self._transact(self._insert, batch)
        self._require_in_place()
        self._write_tail(*batch.lasts)

    def _insert(self, batch: Batch) -> None:
        last = self._writer.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()[0]
        if batch.events and last != batch.events[0][0] - 1:
            raise StoreConflict(f"another coordinator wrote event {last} to {self._path}: stop one of them")
        self._writer.executemany(_INSERT["events"], batch.events)
        self._writer.executemany(_INSERT["receipts"] + _REPLACING, batch.receipts)
        self._writer.executemany(_INSERT["ledger"], batch.ledger)

    def _save_snapshot(self, snapshot: Row, archived: Row | None, kept_from: int) -> None:
        self._writer.execute("DELETE FROM snapshots")
        self._writer.execute(_INSERT["snapshots"], snapshot)
        if archived is not None:
            self._writer.execute(_INSERT["journal"], archived)
        self._writer.execute("DELETE FROM journal WHERE chapter < ?", (kept_from,))
        # The last event stays: its number tells `_append` whether another process wrote.
        self._writer.execute("DELETE FROM events WHERE number < ?", snapshot[:1])


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for pragma in ("busy_timeout=5000", "journal_mode=WAL", "synchronous=FULL"):
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection


def _inode(path: Path) -> int:
    """Return a file's inode; 0 if there is no file."""
    try:
        return os.stat(path).st_ino  # noqa: PTH116 - for each batch
    except FileNotFoundError:
        return 0


def _unusable(path: Path, error: sqlite3.DatabaseError) -> LocalError:
    if getattr(error, "sqlite_errorcode", 0) & _PRIMARY in _OF_DISK:
        return _unwritable(path, error)
    return LocalError(f"{path} cannot be used ({error}): put back a copy of the run's folder")


def _unwritable(path: Path, error: sqlite3.Error) -> LocalError:
    """Return the error of one line. SQLite does not say that descriptors or a few bytes are missing, so that is measured."""
    is_full = False
    try:
        is_full = shutil.disk_usage(path.parent).free < _SHM_BYTES
        with contextlib.ExitStack() as files:
            for _ in range(_FILES):
                files.enter_context(Path(os.devnull).open())
    except OSError as missing:
        if missing.errno in PASSING_FAULTS:
            advice = DISK_FAULTS[missing.errno]
            return TransientFault(f"{path} cannot be opened ({missing.strerror}): {advice}, then start again")
    if is_full or getattr(error, "sqlite_errorcode", 0) & _PRIMARY == sqlite3.SQLITE_FULL:
        return TransientFault(f"{path} cannot be written ({error}): free some space, then start again")
    return LocalError(f"{path} cannot be written ({error}): check the disk and who may write there, then start again")


def _fetch(connection: sqlite3.Connection, query: str, values: Sequence[Any]) -> Sequence[Row]:
    return connection.execute(query.replace("$", "?"), values).fetchall()


def _statements(script: str) -> list[str]:
    """Return the statements of a script that has no `;` inside of any. `executescript` would end the transaction."""
    return [statement for statement in script.split(";") if statement.strip()]
