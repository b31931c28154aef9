"""Disks that are full or read-only, and descriptors that run out: one line that names the file, and an exit code to go by."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.node.batch_coordinator import write_model
from tests.node.coordinator_world import ANNA
from tests.node.rank_jobs import samples
from tests.node.spool_world import make_spool
from tests.node.trust_world import make_source, make_trust
from tests.time_world import VirtualClock

from prime_node.adapters.storage.folder_blobs import FolderDocuments
from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.broadcast.publish.last_signed import LastSigned
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.cli.outcome import MAY_PASS, outcome_of
from prime_node.files import replace, write_durably
from prime_node.folder_lock import FolderLock
from prime_node.inside import write_inside
from prime_node.keyfile import keep_secret, load_or_create
from prime_node.ports.store import LoggedEvent, Store
from prime_node.trainer.checkpointing import Checkpoints
from prime_node.trainer.state import Phase, TrainerState
from prime_node.worker.receipts import ReceiptBook
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError, TransientFault
from prime_protocol.manifest import PartEntry
from prime_protocol.replies import ReceiptList
from prime_protocol.weights import root_of

RUN = "ab" * 32
DISK_BYTES = 2**20
"""Size with room for one checkpoint of 0.6 MB, and not for two."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(
    ("number", "code", "advice"),
    [
        (errno.ENOSPC, MAY_PASS, "free some space"),
        (errno.EMFILE, MAY_PASS, "raise the limit on open files"),
        (errno.EROFS, 3, "choose another folder"),
        (errno.EFBIG, 3, "raise the limit on a file's size"),
    ],
)
def test_a_fault_of_the_disk_is_one_line_that_says_what_to_do(number: int, code: int, advice: str) -> None:
    fault = ExceptionGroup("of a task", [OSError(number, os.strerror(number), "/data/timestamp.json")])
    found = outcome_of(fault)
    assert found is not None
    assert found[0] == code
    assert found[1].startswith(f"/data/timestamp.json: {os.strerror(number)}; {advice}")
    assert found[1].endswith(", then start again")


def test_a_write_that_fails_names_its_file_and_leaves_nothing(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, before[1]))
    try:
        for write in (
            lambda: write_durably(tmp_path / "named", bytes(2_000)),
            lambda: replace(tmp_path / "named", bytes(2_000)),
            lambda: write_inside(tmp_path, "named", bytes(2_000)),
        ):
            with pytest.raises(OSError, match=r"File too large: '.*/named'"):
                write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_piece_for_which_there_is_no_room_is_no_damaged_disk(disk: Path) -> None:
    """Before, its first bytes were kept and counted as all of it: peers got zeros, and the part was fetched again and again."""
    data = os.urandom(2**19)
    entry, parts = PartEntry(digest=digest_of(data), size=len(data)), PartStore(disk / "parts", bytes_max=2**20)
    assert parts.begin(entry)
    (disk / "balloon").write_bytes(bytes(shutil.disk_usage(disk).free - len(data) // 2))
    with pytest.raises(OSError, match=r"No space left on device: '.*\.partial'"):
        parts.put(entry.digest, 0, data)
    (disk / "balloon").unlink()
    parts.put(entry.digest, 0, data)
    assert parts.finish(entry)
    assert parts.read(entry) == data


async def append_until_full(store: Store) -> None:
    for number in range(1, 100):
        await store.append([LoggedEvent(number, 1, "x" * 50_000)])


async def test_a_database_on_a_full_disk_may_be_used_again_once_there_is_room(disk: Path) -> None:
    store = await open_sqlite(disk / "state.sqlite", run=RUN)
    with pytest.raises(
        TransientFault, match=r"state\.sqlite cannot be written \(database or disk is full\): free some space"
    ):
        await append_until_full(store)
    await store.close()
    (disk / "balloon").write_bytes(bytes(shutil.disk_usage(disk).free))
    with pytest.raises(TransientFault, match="free some space"):
        await open_sqlite(disk / "another.sqlite", run=RUN)
    (disk / "balloon").unlink()
    again = await open_sqlite(disk / "state.sqlite", run=RUN)
    await again.check()
    assert [event.number async for event in again.events(after=0)]
    await again.close()


async def test_a_whole_database_on_a_full_disk_may_be_opened_once_there_is_room(disk: Path) -> None:
    """It was a final fault, so that no service started the coordinator again: SQLite only says that it cannot read."""
    await (await open_sqlite(disk / "state.sqlite", run=RUN)).close()
    (disk / "balloon").write_bytes(bytes(shutil.disk_usage(disk).free))
    with pytest.raises(TransientFault, match=r"state\.sqlite cannot be written .*: free some space"):
        await open_sqlite(disk / "state.sqlite", run=RUN)
    (disk / "balloon").unlink()
    await (await open_sqlite(disk / "state.sqlite", run=RUN)).close()


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process have only `count` more descriptors."""
    limits, held = resource.getrlimit(resource.RLIMIT_NOFILE), [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 64, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in held:
            os.close(descriptor)


async def test_a_database_without_descriptors_may_be_opened_once_there_are_some(tmp_path: Path) -> None:
    """It was a final fault, so that no service started the coordinator again: SQLite only says that it cannot open a file."""
    path = tmp_path / "state.sqlite"
    await (await open_sqlite(path, run=RUN)).close()
    for count in range(5):
        with descriptors_left(count), pytest.raises((OSError, LocalError)) as caught:
            await open_sqlite(path, run=RUN)
        code, line = outcome_of(caught.value) or (0, "")
        assert code == MAY_PASS, f"{count} left: {line}"
        assert "raise the limit on open files" in line, f"{count} left: {line}"
    await (await open_sqlite(path, run=RUN)).close()


def test_a_full_disk_is_reported_and_the_checkpoint_before_stays_whole(disk: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    backend = TorchBackend(model, seed=1, threads=1)
    checkpoints = Checkpoints(disk / "checkpoints", run=RUN, kept=1)
    state = TrainerState(run=RUN, phase=Phase.RL, step=0)

    def save(at: TrainerState) -> None:
        folder = checkpoints.begin(at)
        assert folder is not None
        checkpoints.finish(at, backend.save(folder), head=0)

    backend.train_step(samples(), find_loss("aipo"), lr=1e-3)
    save(state)
    saved = root_of(backend.snapshot())
    backend.train_step(samples(seed=1), find_loss("aipo"), lr=1e-3)
    with pytest.raises(LocalError, match=r"cannot be written in .*(full|space).*The previous checkpoint is intact"):
        save(state.updated(step=1))
    assert [path.name for path in (disk / "checkpoints").iterdir()] == ["00000000-step-00000000"]
    found = checkpoints.newest(head=0)
    assert found is not None
    again = TorchBackend(model, seed=2, threads=1)
    again.load(found[1])
    assert (found[0], root_of(again.snapshot())) == (state, saved)


def writers(folder: Path, run: Callable[[Coroutine[Any, Any, object]], object]) -> dict[str, Callable[[], object]]:
    """Return what each role writes, by role and file. Each call writes a file that is not there yet."""
    spool, trust_source = make_spool(folder / "worker" / "spool"), make_source(VirtualClock())
    book = ReceiptBook(folder / "worker", run=trust_source.run, worker=ANNA.key_id)
    trust = make_trust(folder / "validator" / "trust", VirtualClock(), trust_source)
    parts = PartStore(folder / "seed" / "parts", bytes_max=2**20)
    documents, last_signed = FolderDocuments(folder / "coordinator"), LastSigned(folder / "trainer")
    (folder / "trainer").mkdir(exist_ok=True)
    part = bytes(4_096)
    return {
        "worker: spool": lambda: run(spool.put(part, digest_of(b"lease"))),
        "worker: receipts.cursor": lambda: book.add(ReceiptList(receipts=(), next=book.cursor + 1), now_ms=0),
        "validator: trust": lambda: run(trust.refresh()),
        "seed: parts": lambda: parts.write(digest_of(part), part),
        "trainer: signed.json": lambda: last_signed.note(trust_source.signed(0)),
        "coordinator: secret": lambda: keep_secret(folder / "coordinator" / "assignment.secret", bytes(range(32))),
        "seed: identity.key": lambda: load_or_create(folder / "seed" / "identity.key"),
        "validator: lock": lambda: FolderLock(folder / "validator" / "new").release(),
        "coordinator: timestamp.json": lambda: run(documents.write("timestamp.json", part)),
    }


@contextlib.contextmanager
def failing(disk: Path, number: int) -> Iterator[None]:
    """Let the disk be full or read-only, or let the process have no descriptor left."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    match number:
        case errno.ENOSPC:
            (disk / "balloon").write_bytes(bytes(shutil.disk_usage(disk).free))
        case errno.EROFS:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        case errno.EMFILE:
            held = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) - 1, limits[1]))
    try:
        yield
    finally:
        match number:
            case errno.ENOSPC:
                (disk / "balloon").unlink()
            case errno.EROFS:
                subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
            case errno.EMFILE:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for descriptor in held:
                    os.close(descriptor)


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, MAY_PASS), (errno.EMFILE, MAY_PASS), (errno.EROFS, 3)],
    ids=["full", "descriptors", "ro"],
)
def test_each_role_names_the_file_that_it_cannot_write_and_writes_it_once_it_can(
    disk: Path, number: int, code: int
) -> None:
    loop = asyncio.new_event_loop()  # before the descriptors run out
    try:
        writes = writers(disk, loop.run_until_complete)
        with failing(disk, number):
            for name, write in writes.items():
                with pytest.raises((OSError, LocalError, BaseExceptionGroup)) as caught:
                    write()
                found = outcome_of(caught.value)
                assert found is not None, name
                assert found[0] == code, f"{name}: {found}"
                assert str(disk) in found[1], f"{name}: {found}"
                assert "\n" not in found[1]
        for write in writes.values():
            write()
        assert not [path for path in disk.rglob("*.partial") if path.is_file()]
    finally:
        loop.close()
