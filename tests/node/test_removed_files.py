"""Another program removes or replaces files while a role uses them: what was promised is not lost, and one line names them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, folder_parts, running
from tests.node.rotten_world import RUN, be_bad_sector
from tests.node.table_engine import table_weights
from tests.node.worker_world import MemorySource, following, make_follower
from tests.node.worker_world import make_run as make_followers_run

from prime_node.adapters.storage.folder_blobs import FolderBlobs, FolderDocuments
from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.cli.outcome import MAY_PASS, outcome_of
from prime_node.ports.store import LoggedEvent
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError, RemoteError, TransientFault
from prime_protocol.manifest import PartEntry
from prime_protocol.weights import root_of

PART = b"the bytes of a part"
ENTRY = PartEntry(digest=digest_of(PART), size=len(PART))


def event(number: int) -> LoggedEvent:
    """Return an event of the log."""
    return LoggedEvent(number, number, "{}")


async def numbers_in(path: Path) -> list[int]:
    """Return the numbers of the events that a restart finds."""
    store = await open_sqlite(path, run=RUN.digest)
    try:
        await store.check()
        return [each.number async for each in store.events(after=0)]
    finally:
        await store.close()


def remove_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").unlink()


def remove_all(path: Path) -> None:
    for file in path.parent.iterdir():
        file.unlink()


REMOVALS: dict[str, Callable[[Path], object]] = {
    "database": Path.unlink,
    "wal": remove_log,
    "all": remove_all,
    "folder": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("what", REMOVALS)
async def test_a_database_that_is_removed_in_use_is_written_again_with_all_that_it_held(
    tmp_path: Path, what: str
) -> None:
    """Its writer noticed nothing, and a restart found none of the events that it had answered for."""
    path = tmp_path / "run" / "state.sqlite"
    store = await open_sqlite(path, run=RUN.digest)
    await store.append([event(1), event(2)])
    REMOVALS[what](path)
    with pytest.raises(TransientFault, match=r"state\.sqlite or its -wal was removed .* written again") as raised:
        await store.append([event(3)])
    assert "\n" not in str(raised.value)
    await store.close()
    assert await numbers_in(path) == [1, 2, 3]


async def test_a_file_in_the_place_of_a_database_in_use_is_left_as_it_is(tmp_path: Path) -> None:
    path, other = tmp_path / "state.sqlite", tmp_path / "other"
    store = await open_sqlite(path, run=RUN.digest)
    await store.append([event(1)])
    other.write_bytes(b"an older copy, perhaps")
    other.replace(path)
    with pytest.raises(LocalError, match=r"another file was put in the place of \S+state\.sqlite .* is in \S+-saved"):
        await store.append([event(2)])
    await store.close()
    assert path.read_bytes() == b"an older copy, perhaps"
    assert await numbers_in(tmp_path / "state.sqlite-saved") == [1, 2]


@pytest.mark.parametrize("how", ["missing", "empty"])
async def test_a_database_without_its_file_does_not_lose_its_log_too(tmp_path: Path, how: str) -> None:
    """SQLite removed the log, in which everything may be, and began with an empty database."""
    path, killed = tmp_path / "run" / "state.sqlite", tmp_path / "killed"
    store = await open_sqlite(path, run=RUN.digest)
    await store.append([event(1)])
    shutil.copytree(path.parent, killed, ignore=shutil.ignore_patterns("*-shm"))
    await store.close()
    database, log = killed / path.name, killed / f"{path.name}-wal"
    whole, kept = database.read_bytes(), log.read_bytes()
    if how == "missing":
        database.unlink()
    else:
        database.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(LocalError, match=r"state\.sqlite is missing or empty, but not \S+-wal and \S+-tail"):
            await open_sqlite(database, run=RUN.digest)
        assert log.read_bytes() == kept
    database.write_bytes(whole)
    assert await numbers_in(database) == [1]


async def test_a_coordinator_whose_database_is_removed_starts_again_with_each_line_of_its_ledger(
    tmp_path: Path,
) -> None:
    lengths: list[int] = []

    async def run_until_lost() -> None:
        async with running(await folder_parts(RUN, tmp_path), ANNA) as world:
            await world.fill(0)
            lengths.append(await world.parts.store.ledger_length())
            (tmp_path / "state.sqlite").unlink()
            with pytest.raises(RemoteError, match="stopping"):
                await world.lease(ANNA)

    with pytest.raises(BaseExceptionGroup) as ended:
        await run_until_lost()
    known = outcome_of(ended.value)
    assert known is not None
    assert known[0] == MAY_PASS, "a service manager starts it again"
    assert "state.sqlite" in known[1]
    async with running(await folder_parts(RUN, tmp_path)) as world:
        assert await world.parts.store.ledger_length() == lengths[0] > 0
        assert (await world.get("/v1/head"))[0] == 200


async def test_folders_of_blobs_and_documents_that_are_removed_are_made_again(tmp_path: Path) -> None:
    blobs, documents = FolderBlobs(tmp_path / "blobs"), FolderDocuments(tmp_path / "documents")
    for folder in (tmp_path / "blobs", tmp_path / "documents"):
        shutil.rmtree(folder)
    digest = await blobs.put(PART)
    await documents.write("a/name.json", b"{}")
    assert (await blobs.get(digest), await documents.read("a/name.json")) == (PART, b"{}")


def test_a_part_that_is_removed_or_cut_short_in_use_counts_as_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "parts"
    store = PartStore(folder, bytes_max=2**20)
    path = folder / ENTRY.digest
    for damage in (path.unlink, lambda: path.write_bytes(PART[:-1]), lambda: shutil.rmtree(folder)):
        assert store.write(ENTRY.digest, PART)
        damage()
        caplog.clear()
        assert store.read(ENTRY) is None
        assert f"{path} is damaged, or was removed" in caplog.text
        assert not store.has(ENTRY.digest)


def test_a_part_on_a_bad_sector_counts_as_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended each role that follows the run, at each start."""
    store = PartStore(tmp_path, bytes_max=2**20)
    for read in (lambda: store.read(ENTRY), lambda: store.are_sound([ENTRY])):
        assert store.write(ENTRY.digest, PART)
        with monkeypatch.context() as patch:
            be_bad_sector(patch, tmp_path / ENTRY.digest)
            assert store.get(ENTRY.digest, 0, 9) is None
            assert not read()
    assert f"{tmp_path / ENTRY.digest} is damaged" in caplog.text


async def test_a_folder_of_parts_that_is_removed_during_a_download_costs_what_was_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ended a worker, a validator and a seeder."""
    monkeypatch.setattr("prime_protocol.pieces.PIECE_BYTES_MIN", 1)
    source = MemorySource(make_followers_run())
    weights = {f"layer{number}": table_weights(number)["table"] for number in range(6)}
    source.publish(weights)

    def remove(_: str) -> None:
        if len(source.blobs_asked) == 4:
            shutil.rmtree(tmp_path / "parts")

    source.before_blob = remove
    async with following(make_follower(tmp_path, source)) as follower:
        assert root_of((await follower.wait_newer(-1)).weights) == root_of(weights)
    assert "was removed by another program; fetching it again" in caplog.text
