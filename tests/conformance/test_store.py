"""One suite for every store: what ports/store.py promises."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.conformance.store_world import OTHER_RUN, RUN, event, events, receipt

from prime_lab.memory_store import MemoryStore
from prime_lab.postgres_server import PostgresServer, open_postgres
from prime_node.adapters.storage import schema_versions
from prime_node.adapters.storage.postgres_store import read_postgres
from prime_node.adapters.storage.sql_store import ROWS_MAX, TABLES
from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.ports.store import Chapter, LoggedEvent, Segment, Store, StoreConflict, StoredReceipt
from prime_protocol.errors import LocalError

Open = Callable[[str], Awaitable[Store]]
"""Opens one database for the coordinator of a run."""


@pytest.fixture(params=["sqlite", "postgres"])
async def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    if request.param == "sqlite":
        return lambda run: open_sqlite(tmp_path / "state.db", run=run)
    url = request.getfixturevalue("postgres").make_database()
    return lambda run: open_postgres(url, run=run)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    match request.param:
        case "memory":
            store: Store = MemoryStore()
        case "sqlite":
            store = await open_sqlite(tmp_path / "state.db", run=RUN)
        case _:
            store = await open_postgres(request.getfixturevalue("postgres").make_database(), run=RUN)
    yield store
    await store.close()


async def test_events_come_back_in_order(store: Store) -> None:
    await store.append([event(1), event(2)])
    await store.append([event(3)])
    assert await events(store) == [event(1), event(2), event(3)]
    assert await events(store, after=2) == [event(3)]
    assert await events(store, after=3) == []


async def test_more_events_than_are_read_at_once_come_back(store: Store) -> None:
    await store.append([event(number) for number in range(1, ROWS_MAX + 3)])
    assert [entry.number for entry in await events(store)] == list(range(1, ROWS_MAX + 3))


@pytest.mark.parametrize("number", [1, 2, 4])
async def test_a_number_that_is_not_the_next_is_a_conflict_and_nothing_is_written(store: Store, number: int) -> None:
    await store.append([event(1), event(2)])
    with pytest.raises(StoreConflict):
        await store.append([event(number)], [receipt("a")])
    assert await events(store) == [event(1), event(2)]
    assert await store.receipt("a") is None


async def test_a_lease_is_redeemed_by_one_bundle_and_nothing_else_is_written(store: Store) -> None:
    await store.append([event(1)], [receipt("a", lease="x")])
    with pytest.raises(StoreConflict):
        await store.append([event(2)], [receipt("b", lease="x")])
    assert await events(store) == [event(1)]
    assert await store.receipt("b") is None
    await store.append([event(2)], [receipt("c")])


async def test_a_receipt_replaces_the_one_of_the_same_bundle(store: Store) -> None:
    await store.append([event(1)], [receipt("a")])
    await store.append([event(2)], [receipt("a", status="accepted")])
    assert await store.receipt("a") == receipt("a", status="accepted")
    assert await store.receipt("nothing") is None


async def test_receipts_are_listed_by_worker_in_the_order_of_their_last_change(store: Store) -> None:
    await store.append([event(1)], [receipt("a"), receipt("b"), receipt("other", worker="ben")])
    await store.append([event(2)], [receipt("a", status="accepted")])
    first, cursor = await store.receipts_of("anna", after=0, limit=1)
    second, end = await store.receipts_of("anna", after=cursor, limit=10)
    assert [*first, *second] == [receipt("b"), receipt("a", status="accepted")]
    everybody, _ = await store.receipts_of(None, after=0, limit=10)
    assert {one.worker for one in everybody} == {"anna", "ben"}
    assert await store.receipts_of("anna", after=end, limit=10) == ([], end)
    await store.append([event(3)], [receipt("b", status="refused")])
    assert (await store.receipts_of("anna", after=end, limit=10))[0] == [receipt("b", status="refused")]


async def test_a_page_has_as_many_as_fit_in_its_size_and_one_in_any_case(store: Store) -> None:
    lines = ["x" * size for size in (100, 30, 30, 30, 100, 5)]
    stored = [StoredReceipt(f"{place}", f"{place}", "anna", 3, "pending", line) for place, line in enumerate(lines)]
    await store.append([event(1)], stored, lines)
    shown: list[list[int]] = []
    while (start := sum(len(page) for page in shown)) < len(lines):
        shown.append([len(line) for line in await store.ledger(start=start, limit=2, chars_max=70)])
    assert shown == [[100], [30, 30], [30], [100], [5]]
    pages: list[list[int]] = []
    cursor = 0
    while page := (found := await store.receipts_of("anna", after=cursor, limit=9, chars_max=60))[0]:
        pages, cursor = [*pages, [len(one.envelope) for one in page]], found[1]
    assert pages == [[100], [30, 30], [30], [100], [5]]


async def test_the_ledger_grows_with_the_events_or_not_at_all(store: Store) -> None:
    await store.append([event(1)], [receipt("a")], ["zero", "one"])
    with pytest.raises(StoreConflict):
        await store.append([event(1)], [], ["lost"])
    await store.append([event(2)], [], ["two"])
    assert await store.ledger_length() == 3
    assert await store.ledger(start=0, limit=2) == ["zero", "one"]
    assert await store.ledger(start=2, limit=10) == ["two"]
    assert await store.ledger(start=3, limit=10) == []


async def test_a_snapshot_replaces_the_older_one_and_the_log_continues(store: Store) -> None:
    assert await store.latest_snapshot() is None
    await store.append([event(1), event(2), event(3)])
    await store.save_snapshot(2, "two")
    await store.save_snapshot(3, "three")
    assert await store.latest_snapshot() == (3, "three")
    assert await events(store, after=1) == [event(3)], (
        "the last event stays: without it a standby does not see that it lags"
    )
    await store.append([event(4)])
    assert await events(store, after=3) == [event(4)]


async def test_segments_are_archived_with_snapshots_and_deleted_by_chapters(store: Store) -> None:
    assert await store.chapters() == []
    await store.append([event(number) for number in range(1, 7)])
    one, two = Segment(1, 2, 1, 10, "first"), Segment(3, 4, 1, 20, "second")
    await store.save_snapshot(2, "two", one)
    await store.save_snapshot(4, "four", two)
    assert [each async for each in store.segments(after=0)] == [one, two]
    assert [each async for each in store.segments(after=3)] == [two]
    assert await store.chapters() == [Chapter(1, 4, 20, len("first"), len("firstsecond"))]
    three = Segment(5, 6, 5, 30, "third")
    await store.save_snapshot(6, "six", three, kept_from=5)
    assert [each async for each in store.segments(after=0)] == [three]
    assert await store.chapters() == [Chapter(5, 6, 30, len("third"), len("third"))]


async def test_everything_is_there_after_the_database_is_opened_again(opening: Open) -> None:
    store = await opening(RUN)
    await store.append([event(1), event(2)], [receipt("a")], ["zero"])
    await store.save_snapshot(2, "two")
    await store.close()
    again = await opening(RUN)
    assert await again.latest_snapshot() == (2, "two")
    assert await again.receipt("a") == receipt("a")
    await again.append([event(3)], [receipt("b")], ["one"])
    assert await again.ledger(start=0, limit=10) == ["zero", "one"]
    listed, _ = await again.receipts_of("anna", after=0, limit=10)
    assert listed == [receipt("a"), receipt("b")]
    await again.close()


async def test_reads_go_on_beside_an_append(store: Store) -> None:
    await store.append([event(1)], [receipt("a")], ["zero"])
    results = await asyncio.gather(
        store.append([event(number) for number in range(2, 500)], [], ["one"]),
        *(store.receipt("a") for _ in range(20)),
        *(store.ledger(start=0, limit=1) for _ in range(20)),
    )
    assert results[1:21] == [receipt("a")] * 20
    assert results[21:] == [["zero"]] * 20


async def test_text_of_any_language_comes_back(store: Store) -> None:
    text = "日本語 \U0001f600 'quoted' $1 ?1 % \\ \x7f"
    await store.append([LoggedEvent(1, 1, text)], [], [text])
    assert (await events(store))[0].payload == text
    assert await store.ledger(start=0, limit=1) == [text]


async def test_a_second_coordinator_on_the_same_file_is_found_out(tmp_path: Path) -> None:
    first, second = [await open_sqlite(tmp_path / "state.db", run=RUN) for _ in range(2)]
    await first.append([event(1)])
    await first.save_snapshot(1, "one")
    with pytest.raises(StoreConflict):
        await second.append([event(1)])
    await first.close()
    await second.close()


async def test_a_store_of_another_run_is_refused(opening: Open) -> None:
    await (await opening(RUN)).close()
    with pytest.raises(
        LocalError, match=rf"belongs to another run, {RUN[:12]}, not to {OTHER_RUN[:12]}: give each run"
    ):
        await opening(OTHER_RUN)
    await (await opening(RUN)).close()


async def test_a_database_of_a_release_without_versions_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with contextlib.closing(sqlite3.connect(path)) as old:  # as the releases before store_info left it
        old.executescript(
            """
            CREATE TABLE events (number BIGINT NOT NULL, at_ms BIGINT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (number));
            CREATE TABLE snapshots (number BIGINT NOT NULL, payload TEXT NOT NULL, PRIMARY KEY (number));
            CREATE TABLE receipts (bundle VARCHAR(64) NOT NULL, lease_id VARCHAR(64) NOT NULL, worker VARCHAR(64) NOT NULL,
              step BIGINT NOT NULL, status VARCHAR(16) NOT NULL, envelope TEXT NOT NULL, change BIGINT NOT NULL,
              PRIMARY KEY (bundle), UNIQUE (lease_id), UNIQUE (change));
            CREATE INDEX receipts_by_worker ON receipts (worker, change);
            CREATE TABLE ledger (number BIGINT NOT NULL, line TEXT NOT NULL, PRIMARY KEY (number));
            INSERT INTO events VALUES (7, 1763690000007, '{"type":"test","number":7}');
            INSERT INTO snapshots VALUES (7, 'seven');
            INSERT INTO receipts VALUES ('a', 'lease of a', 'anna', 3, 'pending', 'envelope pending', 4);
            INSERT INTO ledger VALUES (0, 'zero');
            """
        )
    store = await open_sqlite(path, run=RUN)
    await store.check()  # the rows have digests now
    assert await store.latest_snapshot() == (7, "seven")
    await store.append([event(8)], [receipt("b")], ["one"])
    assert (await store.receipts_of("anna", after=4, limit=9)) == ([receipt("b")], 5)
    assert await store.ledger(start=0, limit=9) == ["zero", "one"]
    await store.close()
    with pytest.raises(LocalError, match="belongs to another run"):
        await open_sqlite(path, run=OTHER_RUN)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_the_files_of_a_newer_release_change_the_tables_of_an_older_one(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.db"
    url = "" if kind == "sqlite" else request.getfixturevalue("postgres").make_database()

    async def opened() -> Store:
        return await (open_postgres(url, run=RUN) if url else open_sqlite(path, run=RUN))

    store = await opened()
    await store.append([event(1)], [receipt("a")], ["zero"])
    await store.close()
    known, newer = schema_versions.FOLDER, tmp_path / "schema"
    shutil.copytree(known, newer)
    number = len(list((newer / kind).glob("*.sql"))) + 1
    (newer / kind / f"{number:04}.sql").write_text("CREATE INDEX events_by_time ON events (at_ms)")
    monkeypatch.setattr(schema_versions, "FOLDER", newer)
    if url:
        with pytest.raises(LocalError, match="has the tables of an older release: start the coordinator"):
            await read_postgres(url, run=RUN)
    for _ in range(2):  # the file is applied once
        store = await opened()
        await store.check()
        assert await events(store) == [event(1)]
        assert await store.ledger(start=0, limit=9) == ["zero"]
        await store.close()
    with pytest.raises(LocalError, match="belongs to another run"):
        await (open_postgres(url, run=OTHER_RUN) if url else open_sqlite(path, run=OTHER_RUN))
    monkeypatch.setattr(schema_versions, "FOLDER", known)
    with pytest.raises(LocalError, match="written by a newer release"):
        await opened()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
async def test_a_row_that_a_disk_changed_is_named(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    url = "" if kind == "sqlite" else request.getfixturevalue("postgres").make_database()

    def change(statement: str) -> None:
        if url:
            request.getfixturevalue("postgres").execute(statement, database=url.rsplit("/", 1)[1])
            return
        with contextlib.closing(sqlite3.connect(path)) as disk, disk:
            disk.execute(statement)

    store = await (open_postgres(url, run=RUN) if url else open_sqlite(path, run=RUN))
    await store.append([event(1), event(2)], [receipt("a"), receipt("b")], ["zero", "one"])
    await store.save_snapshot(2, "two", Segment(1, 2, 1, 10, "archived"))
    await store.append([event(3), event(4)])
    await store.check()

    async def read(table: str) -> None:
        if table == "journal":
            assert [each async for each in store.segments(after=0)]
        await (events(store, after=2) if table == "events" else store.check())

    for table, column, named in (
        ("receipts", "status", "row 2 of receipts"),
        ("ledger", "line", "row 1 of ledger"),
        ("snapshots", "payload", "row 2 of snapshots"),
        ("events", "payload", "row 3 of events"),
        ("journal", "payload", "row 2 of journal"),
    ):
        key, number = TABLES[table][0], named.split()[1]
        change(f"UPDATE {table} SET {column} = {column} || 'x' WHERE {key} = {number}")
        with pytest.raises(
            LocalError, match=rf"(state\.db|postgresql://\S+): {named} is damaged or lost: check the disk"
        ):
            await read(table)
        change(f"UPDATE {table} SET {column} = substr({column}, 1, length({column}) - 1) WHERE {key} = {number}")
    change("DELETE FROM ledger WHERE number = 0")
    with pytest.raises(LocalError, match="row 0 of ledger is damaged or lost"):
        await store.check()
    await store.close()


async def test_a_start_counts_the_archive_without_reading_its_segments(tmp_path: Path) -> None:
    """Before, a start read and sorted each payload: 44 s for 287 MB on a busy machine, at a takeover too."""
    path = tmp_path / "state.db"
    store = await open_sqlite(path, run=RUN)
    await store.append([event(1), event(2)])
    await store.save_snapshot(2, "two", Segment(1, 2, 1, 10, "archived"))
    with contextlib.closing(sqlite3.connect(path)) as disk, disk:
        disk.execute("UPDATE journal SET payload = ''")
    assert await store.chapters() == [Chapter(1, 2, 10, len("archived"), len("archived"))]
    await store.close()


async def test_tables_of_a_newer_release_are_refused(postgres: PostgresServer, tmp_path: Path) -> None:
    url, path = postgres.make_database(), tmp_path / "state.db"
    for store in (await open_sqlite(path, run=RUN), await open_postgres(url, run=RUN)):
        await store.close()
    postgres.execute("UPDATE store_info SET version = 99", database=url.rsplit("/", 1)[1])
    with contextlib.closing(sqlite3.connect(path)) as newer, newer:
        newer.execute("UPDATE store_info SET version = 99")
    for opened in (open_sqlite(path, run=RUN), open_postgres(url, run=RUN), read_postgres(url, run=RUN)):
        with pytest.raises(LocalError, match=r"written by a newer release .*version 99.*: install that release"):
            await opened


async def test_a_page_that_is_damaged_after_the_store_was_opened_is_an_error_of_one_line(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    store = await open_sqlite(path, run=RUN)
    await store.append([LoggedEvent(number, 1, "x" * 3_000) for number in range(1, 200)])
    await store.close()
    damaged = await open_sqlite(path, run=RUN)
    size = path.stat().st_size
    with path.open("r+b") as file:  # the pages of the rows; the tables' descriptions stay
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))
    with pytest.raises(
        LocalError, match=r"state\.db cannot be used .*malformed\): put back a copy of the run's folder"
    ):
        await events(damaged)
    await damaged.close()


async def test_a_snapshot_is_saved_while_events_are_appended(store: Store) -> None:
    await store.append([event(1), event(2)])
    await asyncio.gather(store.save_snapshot(2, "x" * 2**20), store.append([event(3)]), store.latest_snapshot())
    assert await store.latest_snapshot() == (2, "x" * 2**20)
    assert await events(store, after=2) == [event(3)]
