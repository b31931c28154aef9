"""A disk that changes bits of the coordinator's database, or loses a part of it: found at the next start, and named."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node.coordinator_world import COORDINATOR, folder_parts, running
from tests.node.rotten_world import RUN, copied, run_a_while

from prime_node.adapters.storage.folder_blobs import FolderDocuments
from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.coordinator.api.statements import stored_timestamp
from prime_node.coordinator.own_statements import require_own_statements
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state.snapshot import state_to_json
from prime_node.coordinator.state_follower import restore_state
from prime_protocol.envelope import WireModel, open_envelope, parse_json
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.ledger import LedgerHead
from prime_protocol.manifest import Manifest
from prime_protocol.timestamp import Timestamp

FLIPS, SEED = 300, 24
DATABASE = ("state.sqlite", "state.sqlite-wal", "state.sqlite-tail")


async def content(folder: Path) -> object:
    """Return everything that a coordinator restores from its database, as it does at its start."""
    store = await open_sqlite(folder / DATABASE[0], run=RUN.digest)
    try:
        await store.check()
        number, state = await restore_state(store, rules_of(RUN))
        documents = FolderDocuments(folder / "public"), FolderDocuments(folder / "evidence")
        await require_own_statements(RUN, COORDINATOR, *documents, store, state)
        receipts = await store.receipts_of(None, after=0, limit=10_000)
        return number, state_to_json(state), receipts, await store.ledger(start=0, limit=10_000)
    finally:
        await store.close()


def put_back(kept: Path, folder: Path, name: str, data: bytes) -> None:
    """Make the database new, with other bytes in one file."""
    for one in DATABASE:
        shutil.copy(kept / one, folder)
    (folder / name).write_bytes(data)
    (folder / "state.sqlite-shm").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files of a coordinator that was killed."""
    folder = tmp_path_factory.mktemp("rotten")
    asyncio.run(run_a_while(folder / "run", folder / "kept"))
    return folder / "kept"


@pytest.fixture
def copy(kept: Path) -> Iterator[Path]:
    """Return a copy of these files."""
    with copied(kept) as folder:
        yield folder


async def test_each_flipped_bit_is_named_or_changes_nothing(kept: Path, copy: Path) -> None:
    expected, drawn, outcomes = await content(copy), random.Random(SEED), Counter[str]()
    files = {name: (kept / name).read_bytes() for name in DATABASE}
    for number in range(FLIPS):
        name = drawn.choice(DATABASE[:2]) if number % 10 else DATABASE[2]
        data = bytearray(files[name])
        place, bit = drawn.randrange(len(data)), drawn.randrange(8)
        data[place] ^= 1 << bit
        put_back(kept, copy, name, bytes(data))
        try:
            assert await content(copy) == expected, (
                f"flip {number}: bit {bit} of byte {place} of {name} changed what is restored"
            )
            outcomes["harmless"] += 1
        except LocalError as error:
            message = str(error)
            assert "\n" not in message, f"flip {number}: {message}"
            assert "state.sqlite" in message or "store" in message, f"flip {number}: {message}"
            outcomes["named"] += 1
    assert min(outcomes["named"], outcomes["harmless"]) > FLIPS // 10, outcomes


async def test_a_lost_end_of_the_log_is_named(copy: Path) -> None:
    (copy / "state.sqlite-wal").unlink()
    with pytest.raises(
        LocalError, match=r"state\.sqlite lacks rows \d+ to \d+ of events, which it had: the file or its -wal"
    ):
        await content(copy)


async def test_a_lost_tail_is_said_once_and_written_again(copy: Path, caplog: pytest.LogCaptureFixture) -> None:
    (copy / "state.sqlite-tail").unlink()
    await content(copy)
    assert "state.sqlite-tail is missing, so lost rows at the end are not noticed this time" in caplog.text


async def test_a_store_behind_what_its_coordinator_signed_is_refused(copy: Path) -> None:
    for name in DATABASE:
        (copy / name).unlink()
    with pytest.raises(LocalError, match=r"head\.json names policy 0, but .* store ends at policy -1: it is empty"):
        await content(copy)
    (copy / "public" / "head.json").unlink()
    with pytest.raises(LocalError, match=r"timestamp\.json names policy 0"):
        await content(copy)
    (copy / "public" / "timestamp.json").unlink()
    with pytest.raises(
        LocalError, match=r"ledger in the coordinator's store, of 0 lines, is not the one whose head was signed"
    ):
        await content(copy)


def parsing_flips(whole: bytes, model: type[WireModel]) -> list[bytes]:
    """Return a document with one flipped bit, in drawn ways after which it still parses."""
    drawn, found = random.Random(SEED), []
    for number in drawn.sample(range(8 * len(whole)), min(2_000, 8 * len(whole))):
        data = bytearray(whole)
        data[number // 8] ^= 1 << number % 8
        with contextlib.suppress(RemoteError):
            parse_json(open_envelope(bytes(data)).payload, model)
            found.append(bytes(data))
    return found


async def test_a_flipped_bit_of_a_signed_document_is_only_a_warning(copy: Path) -> None:
    store = await open_sqlite(copy / DATABASE[0], run=RUN.digest)
    published, private = FolderDocuments(copy / "public"), FolderDocuments(copy / "evidence")
    try:
        _, state = await restore_state(store, rules_of(RUN))
        for name, model in (
            ("public/head", Manifest),
            ("public/timestamp", Timestamp),
            ("evidence/ledger_head", LedgerHead),
        ):
            path = copy / f"{name}.json"
            whole = path.read_bytes()
            flips = parsing_flips(whole, model)
            assert flips, name
            for data in flips[:30]:
                path.write_bytes(data)
                head = await require_own_statements(RUN, COORDINATOR, published, private, store, state)
                stamp = await stored_timestamp(RUN, published, COORDINATOR)
                assert (head is None, stamp is None) == (model is LedgerHead, model is Timestamp)
            path.write_bytes(whole)
    finally:
        await store.close()


async def test_an_index_that_lost_rows_is_made_again(kept: Path, copy: Path) -> None:
    path = copy / DATABASE[0]
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (root, size) = database.execute(
            "SELECT rootpage, (SELECT page_size FROM pragma_page_size) FROM sqlite_schema WHERE name = 'receipts_by_worker'"
        ).fetchone()
    with path.open("r+b") as file:  # the index page's number of entries
        file.seek((root - 1) * size + 3)
        file.write(b"\0\0")
    assert await content(copy)


async def test_a_damaged_head_is_healed_from_the_other_file(copy: Path) -> None:
    manifest = copy / "public" / "manifests" / "00000000.json"
    for file in (manifest, copy / "public" / "head.json"):
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + b"x" + whole[-8:])
        async with running(await folder_parts(RUN, copy)):
            assert file.read_bytes() == whole
    for file in (manifest, copy / "public" / "head.json"):
        file.write_bytes(b"")
    with pytest.raises(
        LocalError, match=r"manifests/00000000\.json and head\.json .* are damaged: put back one of them"
    ):
        async with running(await folder_parts(RUN, copy)):
            pass
