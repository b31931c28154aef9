"""`coordinator move` of a file with rows that no coordinator wrote: it names the row, and changes neither store."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import asyncpg
from tests.cases_world import check_each
from tests.node.coordinator_world import ANNA, COORDINATOR, folder_parts, make_parcel, make_run, running
from tests.node.operator_world import write_key
from typer.testing import CliRunner

from prime_lab.postgres_server import PostgresServer
from prime_node.adapters.storage.row_digests import event_digest, row_digest
from prime_node.cli.main import app
from prime_node.cli.run_dir import STATE, RunDir
from prime_protocol.errors import LocalError
from prime_protocol.requests import ReceiptsRequest

RUN = make_run()
TEXT = "CAST(x'ff' AS TEXT)"
"""Text of SQLite that is no UTF-8."""


def put(table: str, column: str, value: object) -> Callable[[sqlite3.Connection], None]:
    """Put a value into the last row of a table, with the digest that belongs to it."""

    def change(opened: sqlite3.Connection) -> None:
        columns = [name for _, name, *_ in opened.execute(f"PRAGMA table_info({table})") if name != "digest"]
        if table == "receipts":
            columns = ["change", *(name for name in columns if name != "change")]
        key, listed = columns[0], ", ".join(columns)
        (last,) = opened.execute(f"SELECT max({key}) FROM {table}").fetchone()
        row = dict(
            zip(columns, opened.execute(f"SELECT {listed} FROM {table} WHERE {key} = {last}").fetchone(), strict=True)
        )
        row[column] = value
        digest = row_digest(*row.values())
        opened.execute(f"UPDATE {table} SET {column} = ?, digest = ? WHERE {key} = {last}", (value, digest))

    return change


def event(payload: str, at_ms: object = 1) -> Callable[[sqlite3.Connection], None]:
    """Add an event after the last one."""

    def change(opened: sqlite3.Connection) -> None:
        last, before = opened.execute("SELECT number, digest FROM events ORDER BY number DESC LIMIT 1").fetchone()
        digest = event_digest(before, last + 1, at_ms, payload)
        opened.execute("INSERT INTO events VALUES (?, ?, ?, ?)", (last + 1, at_ms, payload, digest))

    return change


def twice(table: str, key: str) -> Callable[[sqlite3.Connection], None]:
    """Make a table whose rows need not be unique, and put the last row in again."""

    def change(opened: sqlite3.Connection) -> None:
        (made,) = opened.execute("SELECT sql FROM sqlite_schema WHERE name = ?", (table,)).fetchone()
        rows = opened.execute(f"SELECT * FROM {table} ORDER BY {key}").fetchall()
        opened.execute(f"DROP TABLE {table}")
        opened.execute(made.replace(", PRIMARY KEY (number)", ""))
        marks = ", ".join("?" * len(rows[0]))
        opened.executemany(f"INSERT INTO {table} VALUES ({marks})", [*rows, rows[-1]])

    return change


def run_sql(text: str) -> Callable[[sqlite3.Connection], None]:
    """Run a statement."""

    def change(opened: sqlite3.Connection) -> None:
        opened.execute(text)

    return change


CASES: dict[str, tuple[Callable[[sqlite3.Connection], None], str]] = {
    "NUL in the ledger": (put("ledger", "line", "{}\0"), "row 0 of ledger"),
    "NUL in a worker's name": (put("receipts", "worker", "a\0b"), "row 2 of receipts"),
    "NUL in the archive": (put("journal", "payload", "\0"), "of journal"),
    "NUL in an event": (event("\0"), "of events"),
    "no UTF-8": (run_sql(f"UPDATE receipts SET envelope = {TEXT} WHERE change = 2"), "row 2 of receipts"),
    "no UTF-8 in the archive": (run_sql(f"UPDATE journal SET payload = {TEXT}"), "of journal"),
    "bytes": (put("ledger", "line", b"{}"), "row 0 of ledger"),
    "a word for a number": (put("receipts", "step", "many"), "row 2 of receipts"),
    "a fraction": (event("{}", 0.5), "of events"),
    "a key that is a word": (run_sql("UPDATE ledger SET number = 'last'"), "row last of ledger"),
    "a key that is bytes": (run_sql("UPDATE ledger SET number = x'00ff'"), "of ledger"),
    "a key that is infinite": (run_sql("UPDATE ledger SET number = 9e999"), "row inf of ledger"),
    "a key below zero": (run_sql("UPDATE ledger SET number = -5"), "row -5 of ledger"),
    "a long name": (put("receipts", "worker", "w" * 10_000_000), "row 2 of receipts"),
    "a line twice": (twice("ledger", "number"), "row 0 of ledger"),
    "an event twice": (twice("events", "number"), "of events"),
    "a changed digest": (run_sql("UPDATE journal SET digest = 'x'"), "of journal"),
    "an event of nothing": (event("{}"), "event .* in the coordinator's store"),
    "an event of much depth": (event("[" * 10_000_000), "event .* in the coordinator's store"),
    "an event of a worker that never was": (
        event('{"type":"EscrowReleased","workers":["nobody"]}'),
        "event .* in the coordinator's store",
    ),
    "a state that is none": (put("snapshots", "payload", "[]"), "snapshot .* in the coordinator's store"),
    "a state of much depth": (put("snapshots", "payload", '{"a":' * 10**6), "snapshot .* in the coordinator's store"),
}


async def make_stopped(place: RunDir) -> None:
    """Make the folder of a stopped run, with a settled bundle, a pending one and an archive."""
    async with running(await folder_parts(RUN, place.coordinator, snapshot_events=5)) as world:
        await world.publish()
        await world.join(ANNA)
        for is_judged in (True, False):
            await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
            if is_judged:
                await world.judge()
        await world.client(ANNA).receipts(ReceiptsRequest())
        await world.lease(ANNA, rollouts_max=2)
    write_key(place.key("coordinator"), COORDINATOR)
    place.run_spec.write_bytes(RUN.envelope.to_bytes())


async def tables_of(url: str) -> int:
    """Return the number of tables in a database."""
    opened = await asyncpg.connect(url)
    count: int = await opened.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
    await opened.close()
    return count


def content(path: Path) -> list[tuple[object, ...]]:
    """Return all rows of a file of SQLite."""
    with contextlib.closing(sqlite3.connect(path)) as opened:
        opened.text_factory = bytes
        tables = [
            bytes(name).decode() for (name,) in opened.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")
        ]
        return [row for table in sorted(tables) for row in opened.execute(f"SELECT * FROM {table}")]


def test_a_move_names_a_row_that_no_coordinator_wrote_and_changes_neither_store(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Before, a NUL or a word for a number broke the copy off, and left a part of it in the target."""
    sound = RunDir(tmp_path / "sound")
    asyncio.run(make_stopped(sound))

    def check(case: tuple[Callable[[sqlite3.Connection], None], str]) -> None:
        change, message = case
        url = postgres.make_database()
        place = RunDir(tmp_path / url.rpartition("/")[2])
        shutil.copytree(sound.path, place.path)
        with contextlib.closing(sqlite3.connect(place.coordinator / STATE)) as opened, opened:
            change(opened)
        before = content(place.coordinator / STATE)
        error = CliRunner().invoke(app, ["coordinator", "move", str(place.path), url]).exception
        assert isinstance(error, LocalError), error
        assert re.search(message, str(error)), str(error)[:300]
        assert len(str(error)) < 1_000
        assert content(place.coordinator / STATE) == before
        assert asyncio.run(tables_of(url)) == 0

    check_each(CASES.items(), check)
