"""A worker's spool, and an uploader whose failures a test chooses."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.time_world import VirtualClock

from prime_node.worker.spool import Spool
from prime_protocol.digest import digest_of
from prime_protocol.replies import UploadReply


def make_spool(folder: Path, *, bytes_max: int = 2**20) -> Spool:
    return Spool(folder, bytes_max=bytes_max, clock=VirtualClock(), rng=random.Random(1))


async def flush_all(spool: Spool, upload: Callable[[bytes], Awaitable[UploadReply]]) -> None:
    task = asyncio.create_task(spool.flush(upload))
    done = asyncio.create_task(spool.drained())
    await asyncio.wait({task, done}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        done.cancel()
        task.result()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class Receiver:
    """Uploader whose `faults` are raised first, one per call."""

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)
        self.taken: list[bytes] = []

    async def __call__(self, parcel: bytes) -> UploadReply:
        if self.faults:
            raise self.faults.pop(0)
        self.taken.append(parcel)
        return UploadReply(bundle=digest_of(parcel))
