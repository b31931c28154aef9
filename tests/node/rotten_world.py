"""Files of a role's folder that rot: one is damaged at a time, in each way, in a copy of the folder."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, BEN, folder_parts, make_parcel, make_run, running

from prime_node.adapters.storage import folder_blobs
from prime_node.inside import open_regular
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
    monkeypatch.setattr(
        folder_blobs,
        "open_regular",
        lambda path, flags: open_regular(Path("/proc/self/mem") if path == bad else path, flags),
    )


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
