"""Finished work on disk until the coordinator has it.

Invariant: when `put` has returned, the bundle survives kill -9 and power loss, and stays until the coordinator has
answered: accepted (then it is durable there), or rejected finally (then it is dropped, with its reason in
refused.jsonl). Sending twice is harmless, since uploads are idempotent by digest. Bundles are sent in the order of
arrival.

Concurrency: `put` waits for room, `flush` waits for bundles and for the coordinator, `drained` waits for `flush`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from prime_node.files import disk_faults, read_or_begin, write_durably
from prime_node.inside import open_regular, place, read_regular
from prime_node.patience import Backoff, may_pass
from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_node.traces import of_lease, spanned
from prime_protocol.envelope import parse_json
from prime_protocol.errors import RemoteError
from prime_protocol.parcel import PARCEL_OVERHEAD_BYTES_MAX, open_parcel
from prime_protocol.replies import UploadReply
from prime_protocol.rollout import RolloutHeader
from prime_protocol.visible import number_of

log = logging.getLogger(__name__)

_NAME = re.compile(r"[0-9]{12,}-[A-Za-z0-9_-]+\.parcel")
REFUSED_LINES_MAX = 1_000
"""Number of rejections kept; the oldest are dropped first."""


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    size: int


class Spool:
    """A folder of bundles, oldest first. One process at a time."""

    def __init__(self, folder: Path, *, bytes_max: int, clock: Clock, rng: random.Random, run: str = "") -> None:
        """Load the bundles of the previous process. Raises LocalError.

        With `run`, those of another run, which used the folder before, stay on the disk: its work is not this coordinator's.
        """
        self._folder = folder
        self._bytes_max = bytes_max
        self._clock = clock
        self._rng = rng
        self._changed = asyncio.Condition()
        self.num_uploaded = 0
        self.bytes_uploaded = 0
        with self._on_disk():
            folder.mkdir(parents=True, exist_ok=True)
            for partial in folder.glob("*.partial"):  # never acknowledged
                partial.unlink(missing_ok=True)  # a process that ends may still rename it
            found = sorted(path for path in folder.glob("*.parcel") if _NAME.fullmatch(path.name) and path.is_file())
            own = [path for path in found if not run or _run_of(path) in ("", run)]
            self._entries = deque(_Entry(path, path.stat().st_size) for path in own)
        self._next = 1 + max((int(path.name.split("-")[0]) for path in found), default=0)
        if own:
            log.info("%s of the last start: waiting for upload", number_of(len(own), "finished bundle"))
        if others := len(found) - len(own):
            log.warning(
                "%s in %s of other runs: join those to upload them", number_of(others, "finished bundle"), folder
            )

    @property
    def num_bundles(self) -> int:
        """Return the number of waiting bundles."""
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Return the size of all waiting bundles."""
        return sum(entry.size for entry in self._entries)

    @property
    def lease_ids(self) -> list[str]:
        """Return the leases of the waiting bundles, oldest first, from the file names."""
        return [entry.path.stem.partition("-")[2] for entry in self._entries]

    async def put(self, parcel: bytes, lease_id: str) -> None:
        """Store the bundle of a lease. Durable when it returns; waits while the spool is full. Raises LocalError."""
        async with self._changed:
            if self._is_full(len(parcel)):
                log.warning(
                    "finished work fills its disk space (worker.spool_bytes_max); generation pauses until some is uploaded"
                )
            await self._changed.wait_for(lambda: not self._is_full(len(parcel)))
            path = place(self._folder, f"{self._next:012d}-{lease_id}.parcel")
            self._next += 1
            with self._on_disk():
                await asyncio.to_thread(write_durably, path, parcel)
            self._entries.append(_Entry(path, len(parcel)))
            self._changed.notify_all()

    async def flush(self, upload: Callable[[bytes], Awaitable[UploadReply]]) -> NoReturn:
        """Send bundles in order, forever.

        Raises LocalError, and whatever `upload` raises other than RemoteError and Unreachable.
        """
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._entries)
            entry = self._entries[0]
            with self._on_disk():
                await self._send(entry.path, upload)
                await asyncio.to_thread(entry.path.unlink, missing_ok=True)
            async with self._changed:
                self._entries.popleft()
                self._changed.notify_all()

    async def drained(self) -> None:
        """Wait until nothing is left to upload."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._entries)

    def _is_full(self, incoming: int) -> bool:
        """Return whether there is no room. A bundle larger than the whole limit still goes into an empty spool."""
        return bool(self._entries) and self.num_bytes + incoming > self._bytes_max

    async def _send(self, path: Path, upload: Callable[[bytes], Awaitable[UploadReply]]) -> None:
        """Send a bundle, retrying until the coordinator has given a final answer."""
        backoff = Backoff(self._rng)
        try:
            parcel = await asyncio.to_thread(read_regular, path)  # follow no link: it would upload another file
        except FileNotFoundError:
            log.warning("finished work %s is missing on this disk; its lease will be given to another worker", path)
            return
        while True:
            try:
                with spanned("upload", of_lease(path.stem.partition("-")[2]), num_bytes=len(parcel)):
                    reply = await upload(parcel)
            except (Unreachable, RemoteError) as error:
                if isinstance(error, RemoteError) and not may_pass(error):
                    await asyncio.to_thread(self._note_refusal, path, error.code, error.detail)
                    return
                pause_s = backoff.next_s(error)
                log.info("bundle %s: %s; sending it again in %.1f s", path.stem, error, pause_s)
            else:
                self.num_uploaded += 1
                self.bytes_uploaded += len(parcel)
                if reply.verdict is not None and reply.verdict.reason is not None:
                    await asyncio.to_thread(self._note_refusal, path, reply.verdict.reason, reply.verdict.detail)
                return
            await self._clock.sleep(pause_s)

    def _note_refusal(self, path: Path, reason: str, detail: str) -> None:
        log.warning("bundle %s was rejected: %s: %s", path.stem, reason, detail)
        notes = self._folder / "refused.jsonl"
        line = json.dumps({"at_ms": self._clock.now_ms(), "bundle": path.stem, "reason": reason, "detail": detail})
        lines = read_or_begin(notes).splitlines()  # kept as they are, damaged ones too
        write_durably(notes, b"".join(b"%b\n" % one for one in [*lines[1 - REFUSED_LINES_MAX :], line.encode()]))

    def _on_disk(self) -> AbstractContextManager[None]:
        return disk_faults(f"finished work {self._folder}")


def _run_of(path: Path) -> str:
    """Return the run that a bundle names; empty if it cannot be read. A whole spool may have 1 GiB: only headers are read."""
    try:
        with os.fdopen(open_regular(path, os.O_RDONLY), "rb") as file:
            head = file.read(PARCEL_OVERHEAD_BYTES_MAX)
        return parse_json(open_parcel(head, body_bytes_max=len(head)).envelope.payload, RolloutHeader).run
    except (OSError, RemoteError):
        return ""
