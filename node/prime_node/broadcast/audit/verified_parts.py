"""Read, hash and decode a publication's parts in parallel, for programs that verify a checkpoint.

Waiting: PARTS_AT_ONCE readers take the next free part. Each hashes and decodes its own part while its next one is read, in
threads without the GIL, so no thread waits for the event loop. The first failure ends all readers. Invariant: at most two
parts for each reader are held at one time, and nothing of a part is decoded before the whole part matched its digest.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from prime_node.patience import cancel_all
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.codec import CodecError
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import PartEntry

PARTS_AT_ONCE = min(4, 1 + (os.cpu_count() or 1))
"""Parts read at once: one more than the cores, so that a disk or a server works while every core hashes; four hold 128 MiB."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 * 2**20
"""Free memory that the allocator may keep for each thread."""


def bound_threads() -> None:
    """Bound the memory of a process that only verifies.

    The loop gets no more helper threads than parts, because the allocator keeps a part's memory for each thread that had one.
    The allocator is set to keep it: returning each part's pages and requesting them again takes a third of the time in which
    a part is hashed.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(PARTS_AT_ONCE))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt:  # glibc only
        mallopt(M_MMAP_THRESHOLD, KEPT_BYTES // 2)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


class TakesParts(Protocol):
    """The interface of a CheckpointDecoder that is used here."""

    def feed_part(self, index: int, data: bytes | memoryview) -> None:
        """Decode one part. Called from several threads, never twice for a part. Raises RemoteError."""


class CheckFailed(Exception):
    """A part that fails, and the number of the audit's check that it fails."""

    def __init__(self, at: int, error: RemoteError | Unreachable) -> None:
        super().__init__(str(error))
        self.at = at
        self.error = error


async def feed_parts(
    source: CheckpointSource,
    parts: Sequence[PartEntry],
    decoder: TakesParts,
    *,
    what: str,
    on_part: Callable[[int], None] = lambda _: None,
) -> None:
    """Feed all parts of an encoding into its decoder. Raises CheckFailed.

    `what` names the policy; `on_part` gets the size of each part that has passed.
    """
    numbers = iter(range(len(parts)))
    readers = [
        asyncio.create_task(_feed(source, parts, decoder, numbers, what, on_part))
        for _ in range(min(PARTS_AT_ONCE, len(parts)))
    ]
    try:
        await asyncio.gather(*readers)
    finally:
        await cancel_all(*readers)


async def _feed(
    source: CheckpointSource,
    parts: Sequence[PartEntry],
    decoder: TakesParts,
    numbers: Iterator[int],
    what: str,
    on_part: Callable[[int], None],
) -> None:
    """Run one reader."""
    reading = _read(source, parts, numbers)
    try:
        while reading is not None:
            number, task = reading
            data = await task
            reading = _read(source, parts, numbers)
            await asyncio.to_thread(_take, parts[number], decoder, number, data, what)
            on_part(parts[number].size)
            del data
    except (RemoteError, Unreachable) as error:
        raise CheckFailed(5, error) from None
    finally:
        if reading is not None:
            await cancel_all(reading[1])


def _read(
    source: CheckpointSource, parts: Sequence[PartEntry], numbers: Iterator[int]
) -> tuple[int, asyncio.Task[bytes]] | None:
    """Begin to read the next part, if there is one."""
    number = next(numbers, None)
    if number is None:
        return None
    return number, asyncio.create_task(source.blob(parts[number].digest, start=0, end=parts[number].size))


def _take(entry: PartEntry, decoder: TakesParts, number: int, data: bytes, what: str) -> None:
    """Check one part and decode it."""
    if len(data) != entry.size or digest_of(data) != entry.digest:
        detail = f"{what}: part {number} does not have its digest {entry.digest[:12]}"
        raise CheckFailed(5, RemoteError(ErrorCode.DIGEST_MISMATCH, detail))
    try:
        decoder.feed_part(number, data)
    except CodecError as error:
        raise CheckFailed(7, error) from None
    except RemoteError as error:
        raise CheckFailed(6, error) from None
