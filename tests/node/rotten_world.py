"""Files of a role's folder that rot: one is damaged at a time, in each way, in a copy of the folder."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import ANNA, BEN, folder_parts, make_parcel, make_run, running

from prime_protocol.verdict import RejectReason

RUN = make_run()
DAMAGES = ("flip", "flip", "truncate", "empty", "remove")


@contextmanager
def copied(kept: Path) -> Iterator[Path]:
    """Copy a folder, into memory where there is such a folder: each start syncs the disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield shutil.copytree(kept, Path(folder) / "copy")


def damage(path: Path, how: str, drawn: random.Random) -> None:
    """Damage one file."""
    data = bytearray(path.read_bytes())
    match how:
        case "flip":
            data[drawn.randrange(len(data))] ^= 1 << drawn.randrange(8)
            path.write_bytes(data)
        case "truncate":
            path.write_bytes(data[: len(data) // 2])
        case "empty":
            path.write_bytes(b"")
        case "remove":
            path.unlink()


def be_bad_sector(monkeypatch: pytest.MonkeyPatch, bad: Path) -> None:
    """Let the disk be unable to read one file: the kernel answers EIO for address 0 of a process."""
    opened = os.open

    def open_bad(path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        return opened("/proc/self/mem" if os.fspath(path) == str(bad) else path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", open_bad)


def be_bad_block(monkeypatch: pytest.MonkeyPatch, bad: Path, at: int) -> None:
    """Let the disk be unable to read one byte of a file."""
    opened = os.fdopen

    class BadBlock(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            if self.tell() <= at < self.tell() + len(buffer):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().readinto(buffer)

    def open_bad(descriptor: int, *values: Any, **settings: Any) -> Any:
        if Path(f"/proc/self/fd/{descriptor}").readlink() == bad:
            return io.BufferedReader(BadBlock(descriptor))
        return opened(descriptor, *values, **settings)

    monkeypatch.setattr(os, "fdopen", open_bad)


def kinds_of(folder: Path) -> list[Path]:
    """Return one file of each kind, relative. Those of one folder whose names have digits are of one kind."""
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size:
            name = "#" if any(letter.isdigit() for letter in path.stem) else path.stem
            found[f"{path.parent.relative_to(folder).parts[:1]}{name}{path.suffix}"] = path.relative_to(folder)
    return list(found.values())


async def run_a_while(folder: Path, kept: Path) -> None:
    """Run a coordinator in `folder`, and copy its files as a kill would leave them."""
    async with running(await folder_parts(RUN, folder, snapshot_events=10)) as world:
        await world.join(ANNA, BEN)
        await world.publish()
        await world.fill(0)
        await world.get("/v1/ledger")
        lease = await world.lease(BEN, rollouts_max=2)
        await world.client(BEN).upload(make_parcel(lease, BEN))
        await world.judge(reason=RejectReason.UNVERIFIABLE)
        await world.lease(ANNA, rollouts_max=2)

        async def is_dated() -> bool:  # the timestamp follows its manifest
            return await asyncio.to_thread(lambda: any(folder.rglob("timestamp.json")))

        await world.until(is_dated)
        await asyncio.to_thread(shutil.copytree, folder, kept, ignore=shutil.ignore_patterns("*-shm"))
