"""A folder from a stranger, with links that lead to the owner's files. Nothing is read, written, deleted, uploaded or served
through them."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from tests.security.planted_world import PLANTED, plant

from prime_node.adapters.storage.folder_blobs import FolderBlobs, FolderDocuments
from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.uplink import DataCap
from prime_node.cli.run_dir import RunDir
from prime_node.files import replace, write_durably
from prime_node.folder_lock import FolderLock
from prime_node.inside import NotRegular, open_regular, read_regular, refuse_links, write_inside
from prime_node.observe import JsonLines
from prime_node.ports.transport import Unreachable
from prime_node.worker.spool import Spool
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.manifest import PartEntry

SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"
NAME = "ab" * 32


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the owner's, outside the folder that the tool was given."""
    path = tmp_path / "id_ed25519"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("place", ["lock", "parts", "model/config.json", "a/b/c/d", "receipts.jsonl"])
def test_a_role_does_not_start_in_a_folder_with_a_link(state: Path, secret: Path, place: str) -> None:
    (state / place).parent.mkdir(parents=True, exist_ok=True)
    (state / place).symlink_to(secret)
    with pytest.raises(LocalError, match="is a link or not a file"):
        FolderLock(state)
    assert secret.read_bytes() == SECRET


def test_a_role_does_not_start_in_a_folder_with_a_link_to_a_folder_or_to_nothing_or_with_a_pipe(state: Path) -> None:
    for make in (
        lambda path: path.symlink_to(state.parent),
        lambda path: path.symlink_to("/nowhere"),
        os.mkfifo,
    ):
        make(state / "public")
        with pytest.raises(LocalError, match="public"):
            FolderLock(state)
        (state / "public").unlink()
    FolderLock(state).release()


def test_a_folder_that_its_owner_names_by_a_link_is_taken(state: Path, tmp_path: Path) -> None:
    (tmp_path / "big-disk").symlink_to(state)
    FolderLock(tmp_path / "big-disk").release()


def test_the_name_of_a_planted_link_steers_no_terminal(state: Path, secret: Path) -> None:
    (state / "x\x1b[2J\u202e").symlink_to(secret)
    with pytest.raises(LocalError) as caught:
        refuse_links(state)
    assert str(caught.value).isprintable()


def test_a_link_among_the_parts_is_neither_served_nor_written_through_nor_a_reason_to_delete(
    state: Path, secret: Path
) -> None:
    other = state / "notes.txt"
    other.write_bytes(b"mine")
    (state / NAME).symlink_to(secret)
    parts = PartStore(state, bytes_max=2**20)
    entry = PartEntry(digest=NAME, size=len(SECRET))
    assert not parts.has_some(NAME)
    assert parts.get(NAME, 0, 10) is None
    assert parts.get_cached(NAME, 0, 10) is None
    assert parts.read(entry) is None
    assert not parts.are_sound([entry])
    parts.keep_only([])
    assert (secret.read_bytes(), other.read_bytes()) == (SECRET, b"mine")


def test_a_link_that_is_planted_while_a_part_is_on_its_way_is_not_written_through(state: Path, secret: Path) -> None:
    data = b"verified bytes that a stranger has chosen"
    digest = digest_of(data)
    parts = PartStore(state, bytes_max=2**20)
    (state / f"{digest}.partial").symlink_to(secret)
    with pytest.raises(NotRegular):
        parts.begin(PartEntry(digest=digest, size=len(data)))
    with pytest.raises(NotRegular):
        parts.put(digest, 0, data)
    parts.write(digest, data)
    assert (state / digest).read_bytes() == data
    assert secret.read_bytes() == SECRET


async def test_a_link_among_published_blobs_and_documents_is_not_served(state: Path, secret: Path) -> None:
    (state / "blobs" / "ab").mkdir(parents=True)
    (state / "blobs" / "ab" / NAME).symlink_to(secret)
    (state / "head.json").symlink_to(secret)
    blobs = FolderBlobs(state / "blobs")
    assert not await blobs.has(NAME)
    for asked in (blobs.get(NAME), blobs.size(NAME), FolderDocuments(state).read("head.json")):
        with pytest.raises(KeyError):
            await asked


async def test_a_folder_that_is_verified_leads_nowhere_and_does_not_hang(state: Path, secret: Path) -> None:
    (state / "run.json").symlink_to(secret)
    os.mkfifo(state / "head.json")
    source = FolderSource(state)
    for asked in (source.run_spec(), source.head()):
        with pytest.raises((Unreachable, RemoteError)):
            await asyncio.wait_for(asked, 5.0)


async def test_a_link_in_the_spool_is_not_uploaded(state: Path, secret: Path) -> None:
    (state / f"000000000001-{NAME}.parcel").symlink_to(secret)
    sent: list[bytes] = []

    async def upload(parcel: bytes) -> None:
        sent.append(parcel)

    spool = Spool(state, bytes_max=2**20, clock=SystemClock(), rng=random.Random(0))
    with pytest.raises(LocalError):
        await asyncio.wait_for(spool.flush(upload), 5.0)  # type: ignore[arg-type]
    assert not sent


def test_lines_that_hold_words_of_strangers_are_not_appended_to_what_a_shell_reads(state: Path, tmp_path: Path) -> None:
    shell = tmp_path / ".bashrc"
    shell.write_text("# mine\n")
    (state / "metrics.jsonl").symlink_to(shell)
    with pytest.raises(NotRegular):
        JsonLines(state / "metrics.jsonl").record(step=1)
    assert shell.read_text() == "# mine\n"


def test_a_file_is_replaced_and_what_a_link_of_its_name_leads_to_is_not(state: Path, secret: Path) -> None:
    for write in (write_durably, replace, lambda path, data: write_inside(path.parent, path.name, data)):
        (state / "status.json").unlink(missing_ok=True)
        (state / "status.json").symlink_to(secret)
        (state / "status.json.partial").symlink_to(secret)
        write(state / "status.json", b"{}")
        assert (state / "status.json").read_bytes() == b"{}"
        assert not (state / "status.json").is_symlink()
        assert secret.read_bytes() == SECRET
        (state / "status.json.partial").unlink(missing_ok=True)


def test_the_data_cap_is_not_written_through_a_link(state: Path, secret: Path) -> None:
    (state / "upload.json.partial").symlink_to(secret)
    DataCap(1_000, days=30, file=state / "upload.json", clock=SystemClock()).take(1_000)
    assert (state / "upload.json").is_file()
    assert secret.read_bytes() == SECRET


def test_what_is_no_file_is_neither_followed_nor_waited_for(state: Path, secret: Path) -> None:
    (state / "link").symlink_to(secret)
    (state / "folder").mkdir()
    os.mkfifo(state / "pipe")
    for name, flags in (("link", os.O_RDONLY), ("link", os.O_WRONLY | os.O_CREAT), ("folder", os.O_RDONLY)):
        with pytest.raises(NotRegular):
            open_regular(state / name, flags)
    for flags in (os.O_RDONLY, os.O_WRONLY):
        with pytest.raises(NotRegular):
            open_regular(state / "pipe", flags)
    with pytest.raises(NotRegular):
        read_regular(Path("/dev/zero"))
    with pytest.raises(FileNotFoundError):
        read_regular(state / "nothing")


@pytest.mark.parametrize("kind", PLANTED)
def test_a_run_folder_of_others_neither_hangs_a_command_nor_fills_the_memory(state: Path, kind: str) -> None:
    """Before, `status`, `ledger verify` and `coordinator` waited for a pipe without end, and read all of /dev/zero."""
    folder = RunDir(state)
    for file in (folder.run_spec, folder.join_link_file):
        plant(file, kind)
    for read in (folder.load_run, folder.join_link):
        with pytest.raises(LocalError, match=r"cannot be read|more than"):
            read()


def test_a_link_that_is_too_long_for_a_path_is_no_run_folder() -> None:
    assert not RunDir(Path("x" * 5_000)).exists
