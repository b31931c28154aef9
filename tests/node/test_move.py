"""A stopped run moves from SQLite to PostgreSQL and back, with the same state, cursors and ledger."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    running,
)
from tests.node.operator_world import write_key
from typer.testing import CliRunner, Result

from prime_lab.postgres_server import PostgresServer, open_postgres
from prime_node.adapters.storage import store_copy
from prime_node.adapters.storage.postgres_store import postgres_database
from prime_node.adapters.storage.sql_store import SqlStore
from prime_node.adapters.storage.sqlite_store import SqliteDatabase, open_sqlite, sqlite_database
from prime_node.adapters.storage.store_copy import copy_store, moved_to, unfinished_from
from prime_node.cli.main import app
from prime_node.cli.run_dir import STATE, RunDir
from prime_node.cli.wire_store import open_database, read_store, store_setting
from prime_node.coordinator.ledger import load_chain
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state.snapshot import state_to_json
from prime_node.coordinator.state_follower import restore_state
from prime_node.folder_lock import FolderLock
from prime_node.ports.store import LoggedEvent, Segment
from prime_protocol.errors import LocalError
from prime_protocol.requests import ReceiptsRequest

RUN = make_run()


@dataclass
class Moved:
    """What a move must keep."""

    event: int
    state: str
    ledger: tuple[int, str]
    receipts: list[object]
    cursor: int


def move(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["coordinator", "move", *arguments])


def error_of(*arguments: str) -> str:
    error = move(*arguments).exception
    assert isinstance(error, LocalError), error
    return str(error)


async def work(world: World) -> None:
    """Settle two bundles, and leave one without a verdict and a lease without a bundle."""
    await world.join(ANNA, BEN)
    for key in (ANNA, BEN):
        await world.client(key).upload(make_parcel(await world.lease(key, rollouts_max=2), key))
        await world.judge()
    await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
    await world.client(ANNA).receipts(ReceiptsRequest())  # makes the pending one
    await world.lease(BEN, rollouts_max=2)


@pytest.fixture
async def place(tmp_path: Path) -> RunDir:
    """Folder of a stopped run in SQLite."""
    place = RunDir(tmp_path / "run")
    async with running(await folder_parts(RUN, place.coordinator, snapshot_events=5)) as world:
        await world.publish()
        await work(world)
    write_key(place.key("coordinator"), COORDINATOR)
    place.run_spec.write_bytes(RUN.envelope.to_bytes())
    return place


async def kept(setting: str, place: RunDir) -> Moved:
    """Return what the store of a run holds."""
    store = await read_store(setting, RUN, place.coordinator)
    try:
        number, state = await restore_state(store, rules_of(RUN))
        chain = await load_chain(store, RUN.digest)
        receipts, cursor = await store.receipts_of(None, after=0, limit=100)
        return Moved(number, state_to_json(state), (chain.num_entries, chain.digest), list(receipts), cursor)
    finally:
        await store.close()


async def test_a_run_moves_to_postgresql_and_back_and_goes_on_there(place: RunDir, postgres: PostgresServer) -> None:
    url = postgres.make_database()
    before = await kept("sqlite", place)
    assert before.ledger[0] == 2
    assert len(before.receipts) == 3
    shown = await asyncio.to_thread(move, str(place.path), url)
    assert shown.exit_code == 0, shown.exception
    assert before.ledger[1][:16] in shown.stdout
    assert store_setting(place.path) == url
    assert await kept(url, place) == before
    with pytest.raises(
        LocalError, match=r"state\.sqlite is not in use: the run has moved to postgresql://127.*set coordinator\.store"
    ):
        await open_sqlite(place.coordinator / STATE, run=RUN.digest)
    async with running(await folder_parts(RUN, place.coordinator, store=url)) as world:
        await world.judge()
    after = await kept(url, place)
    assert after.ledger[0] == 3
    database = await postgres_database(url, run=RUN.digest)  # of a coordinator on another machine
    await database.write_document("public", "manifests/00000009.json", b"of another machine")
    await database.close()
    shown = await asyncio.to_thread(move, str(place.path), "sqlite")
    assert shown.exit_code == 0, shown.exception
    assert await kept("sqlite", place) == after
    assert (place.public / "manifests" / "00000009.json").read_bytes() == b"of another machine"
    with pytest.raises(LocalError, match="is not in use: the run has moved to"):
        await open_postgres(url, run=RUN.digest)
    async with running(await folder_parts(RUN, place.coordinator)) as world:
        assert world.parts.run == RUN
    assert "coordinator.store=" in place.overrides_file.read_text()


async def test_a_running_coordinator_is_not_moved(place: RunDir, postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.make_database()
    lock = FolderLock(place.coordinator)
    assert "already uses it; stop that process" in await asyncio.to_thread(error_of, str(place.path), url)
    lock.release()
    other = await open_postgres(url, run=RUN.digest)
    assert "is used by the coordinator on" in await asyncio.to_thread(error_of, str(place.path), url)
    await other.close()
    await (await open_sqlite(place.coordinator / STATE, run=RUN.digest)).close()  # it is still the run's store


async def test_a_store_that_holds_a_state_is_not_overwritten(place: RunDir, postgres: PostgresServer) -> None:
    url = postgres.make_database()
    assert (await asyncio.to_thread(move, str(place.path), url)).exit_code == 0
    second = RunDir(place.path.parent / "second")
    async with running(await folder_parts(RUN, second.coordinator)) as world:
        await world.publish()
    second.run_spec.write_bytes(RUN.envelope.to_bytes())
    assert "holds a state already: name an empty database" in await asyncio.to_thread(error_of, str(second.path), url)
    assert (await kept("sqlite", second)).event > 0
    again = await asyncio.to_thread(error_of, str(place.path), postgres.make_database(), "--from", "sqlite")
    assert "is not in use: the run has moved to" in again


@pytest.mark.parametrize("source_is_closed", [False, True])
async def test_a_move_that_was_killed_is_completed_by_the_same_command(
    place: RunDir, postgres: PostgresServer, source_is_closed: bool
) -> None:
    url, before = postgres.make_database(), await kept("sqlite", place)
    new, new_place = await open_database(url, RUN, place.coordinator)
    await new.set_closed(unfinished_from(str((place.coordinator / STATE).resolve())))
    await new.insert("ledger", [(0, "half", "")])
    await new.close()
    if source_is_closed:
        old, _ = await open_database("sqlite", RUN, place.coordinator)
        await old.set_closed(moved_to(new_place))
        await old.close()
    with pytest.raises(
        LocalError, match=r"is not in use: a move into it from .*state\.sqlite has not ended; run that .* again"
    ):
        await open_postgres(url, run=RUN.digest)
    assert (await asyncio.to_thread(move, str(place.path), url)).exit_code == 0
    assert await kept(url, place) == before


async def test_a_stale_store_is_not_copied_over_a_move_that_has_not_ended(
    place: RunDir, postgres: PostgresServer
) -> None:
    first, second = postgres.make_database(), postgres.make_database()
    assert (await asyncio.to_thread(move, str(place.path), first)).exit_code == 0
    old_place = str((place.coordinator / STATE).resolve())
    new, _ = await open_database(second, RUN, place.coordinator)  # a move into it was killed
    await new.set_closed(unfinished_from(old_place))
    await new.close()
    stale = await asyncio.to_thread(error_of, str(place.path), second, "--from", "sqlite")
    assert "is not in use: the run has moved to" in stale


async def test_a_store_that_the_run_has_left_is_not_copied_over_a_later_move(
    place: RunDir, postgres: PostgresServer
) -> None:
    first, second = postgres.make_database(), postgres.make_database()
    for url in (first, second):
        assert (await asyncio.to_thread(move, str(place.path), url)).exit_code == 0
    new, _ = await open_database(first, RUN, place.coordinator)  # a move back from `second` was killed
    await new.set_closed(unfinished_from(second))
    await new.close()
    stale = await asyncio.to_thread(error_of, str(place.path), first, "--from", "sqlite")
    assert "is not in use: the run has moved to" in stale


async def test_a_move_that_was_killed_before_it_wrote_the_setting_is_completed_by_the_same_command(
    place: RunDir, postgres: PostgresServer
) -> None:
    url, before = postgres.make_database(), await kept("sqlite", place)
    place.overrides_file.write_text("trainer.seed=1\n")
    assert (await asyncio.to_thread(move, str(place.path), url)).exit_code == 0
    place.overrides_file.write_text("trainer.seed=1\n")  # as the kill left it
    async with running(await folder_parts(RUN, place.coordinator, store=url)) as world:
        await world.judge()
    after = await kept(url, place)
    assert after.event > before.event
    shown = await asyncio.to_thread(move, str(place.path), url)
    assert shown.exit_code == 0, shown.exception
    assert after.ledger[1][:16] in shown.stdout
    assert place.overrides_file.read_text() == f"trainer.seed=1\ncoordinator.store={url}\n"
    assert await kept(url, place) == after


async def test_a_store_is_read_while_its_coordinator_saves_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunDir(tmp_path / "run").coordinator
    async with running(await folder_parts(RUN, folder)) as world:
        await world.publish()
        await work(world)
        store = await read_store("sqlite", RUN, folder)
        number, state = await restore_state(store, rules_of(RUN))
        read, text = store.latest_snapshot, state_to_json(state)

        async def latest() -> tuple[int, str] | None:
            found = await read()
            await store.save_snapshot(number, text)
            return found

        monkeypatch.setattr(store, "latest_snapshot", latest)
        assert await read() is None
        again = await restore_state(store, rules_of(RUN))
        assert (again[0], state_to_json(again[1])) == (number, text)
        await store.close()


async def test_a_move_reads_each_segment_of_the_archive_once_and_once_more_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the query for a page read all segments after it: an archive of 60 MB took 10 s, and one of 1 GB hours."""
    count = 12
    source, target = [await sqlite_database(tmp_path / name / STATE, run="a" * 64) for name in ("from", "into")]
    store = await SqlStore.over(source)
    for number in range(count):
        await store.append([LoggedEvent(number + 1, 0, "{}")])
        await store.save_snapshot(number + 1, "{}", Segment(number + 1, number + 1, 1, 0, "x" * 100))
    read, fetch = list[int](), SqliteDatabase.fetch

    async def counted(database: SqliteDatabase, query: str, *values: Any) -> Any:
        if " journal " in query:
            _, limit, after = values
            read.append(min(limit, count - max(0, after)))
        return await fetch(database, query, *values)

    async def check() -> None: ...

    monkeypatch.setattr(SqliteDatabase, "fetch", counted)
    monkeypatch.setattr(store_copy, "PAGE_CHARS_MAX", 200)
    found = await copy_store(source, target, source_place="from", target_place="into", check=check)
    assert found["journal"] == count
    assert sum(read) <= 3 * count + 1
    await source.close()
    await target.close()


async def test_a_store_that_lacks_an_event_is_an_error_of_one_line(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run").coordinator
    async with running(await folder_parts(RUN, folder)) as world:
        await world.publish()
        await work(world)
        store = await read_store("sqlite", RUN, folder)
        number, _ = await restore_state(store, rules_of(RUN))
        with contextlib.closing(sqlite3.connect(folder / STATE)) as damaged, damaged:
            damaged.execute("DELETE FROM events WHERE number = ?", (number - 1,))
        with pytest.raises(LocalError, match=f"event {number - 1} is missing in the coordinator's store: put back"):
            await restore_state(store, rules_of(RUN))
        await store.close()


async def test_a_coordinator_with_an_empty_store_beside_published_policies_does_not_start(
    place: RunDir, postgres: PostgresServer
) -> None:
    with pytest.raises(LocalError, match=r"head\.json names policy .*store ends at policy -1: it is empty.* Set"):
        async with running(await folder_parts(RUN, place.coordinator, store=postgres.make_database())):
            pass


@pytest.mark.parametrize("to", ["mysql://x/y", "nowhere"])
async def test_a_place_that_is_no_store_is_refused(place: RunDir, to: str) -> None:
    assert 'expected "sqlite" or "postgresql://' in await asyncio.to_thread(error_of, str(place.path), to)
    assert "the run is in sqlite already" in await asyncio.to_thread(error_of, str(place.path), "sqlite")
