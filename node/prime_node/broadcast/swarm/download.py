"""Download of one encoding from all sources at once.

Waiting: `run` asks every source that has room for the piece that the picker names. It waits until a piece has come, a source
has changed, or TICK_S have passed (work is stolen from silent sources). Each piece is fetched by a task of its own. One job
in a decoder's thread then verifies it, stores it, reports it, and decodes it: peers learn of a piece before it is decoded,
and it crosses between threads once. Pieces in memory are bounded, those queued for the decoder included.

Invariant: nothing is stored, announced or decoded before each of its chunks matched its digest. A wrong piece is attributed
exactly, since a piece comes from one source and is hashed alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from prime_node.broadcast.swarm.holdings import Holding, Holdings
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.picker import Picker, PickerRules
from prime_node.broadcast.swarm.piece_sets import PieceSet, members, piece_set, span
from prime_node.broadcast.swarm.sources import ROUNDS_MAX, NamedSource, SourceKind, SourcePool, fetch_from
from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.chunk_index import ChunkIndex
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import Encoding
from prime_protocol.pieces import Piece, check_piece, cut_pieces

T = TypeVar("T")
TICK_S = 0.1
"""Seconds between checks whether to take over a silent source's work."""
TREE_S_MAX = 2.0
"""Seconds for which our parents alone are asked where an encoding goes down the tree; then all peers are."""
DECODERS = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "decode")
"""Thread pool of all downloads.

Each thread keeps a dozen megabytes of codec buffers, which would otherwise be allocated for each delta.
"""

Decode = Callable[[range, bytes | memoryview], None]
"""Function of (numbers of neighbouring chunks, the verified bytes of all of them). Called from threads. Raises PeerError."""


@dataclass
class Download:
    """One download and what it works with. Call `run` once."""

    encoding: Encoding
    index: ChunkIndex
    decode: Decode
    pool: SourcePool
    parts: PartStore
    holdings: Holdings
    clock: Clock
    rng: random.Random
    memory_bytes_max: int
    rules: PickerRules = field(default_factory=PickerRules)
    on_bytes: Callable[[int], None] = lambda num_bytes: None
    """Callback for verified bytes, from the disk or from a source."""
    received: dict[str, int] = field(default_factory=dict)
    """Bytes of pieces by source, duplicates included."""

    def __post_init__(self) -> None:
        self._pieces = cut_pieces(self.encoding, self.index)
        self._name = self.encoding.index.digest
        self._of_part: list[PieceSet] = [0] * len(self.encoding.parts)
        for number, piece in enumerate(self._pieces):
            self._of_part[piece.part] |= 1 << number
        self._stored: set[int] = set()
        """Parts with room on the disk."""
        self._decoding = threading.Lock()
        self._decoded: PieceSet = 0
        """Pieces that a thread has taken up; a duplicate is not decoded again. Guarded by the lock."""
        self._absent: dict[str, PieceSet] = {}
        """Pieces that a permanent source reported missing."""
        self._tasks: dict[asyncio.Task[None], tuple[str, int]] = {}
        self._asked: set[asyncio.Task[None]] = set()
        """Tasks that wait for a source; the others verify, store or decode."""
        self._memory_bytes = 0
        self._news = asyncio.Event()
        self._error: Exception | None = None

    async def run(self) -> None:
        """Download until everything is decoded.

        Raises PeerError(NOT_FOUND) if no source has a piece any more, another PeerError if verified bytes do not decode,
        Unreachable if no source gives anything for long, OSError from the disk.
        """
        have = await self._from_disk()
        self.holdings.add(Holding(self.encoding, self._pieces, have & self._on_disk()))
        sizes = [piece.size for piece in self._pieces]
        share = self.pool.share(self._name, len(sizes))
        self._picker = Picker(sizes, rng=self.rng, rules=self.rules, have=have, share=share)
        self._parents = self.pool.parents(self.encoding.sent_bytes)
        self._tree_until_s = self.clock.monotonic_s() + TREE_S_MAX
        beside = asyncio.create_task(self._listen()), asyncio.create_task(self.pool.prepare())
        try:
            await self._fetch_all()
        finally:
            for task in (*beside, *self._tasks):
                task.cancel()
            await asyncio.gather(*beside, *self._tasks, return_exceptions=True)

    # From the disk

    async def _from_disk(self) -> PieceSet:
        """Decode what is on disk from an earlier download. Return the pieces."""
        found = 0
        for part, entry in enumerate(self.encoding.parts):
            is_new = not self.parts.has_some(entry.digest)
            if not await asyncio.to_thread(self.parts.begin, entry):
                continue
            self._stored.add(part)
            if is_new:
                continue
            here = await self._in_decoder(self._take_verified, part)
            self.on_bytes(sum(self._pieces[number].size for number in members(here)))
            found |= here
            if here == self._of_part[part]:
                await asyncio.to_thread(self.parts.finish, entry)
            elif self.parts.has(entry.digest):
                await asyncio.to_thread(self.parts.reopen, entry.digest)
        return found

    def _take_verified(self, part: int) -> PieceSet:
        """Return the pieces of a part on disk that verify, decoded. It reads one at a time, since a part may be large."""
        here, digest = [], self.encoding.parts[part].digest
        for number in members(self._of_part[part]):
            piece = self._pieces[number]
            data = self.parts.get(digest, piece.start, piece.end)
            try:
                self._check(piece, data or b"")
            except PeerError:
                continue
            assert data is not None
            self.decode(piece.chunks, data)
            here.append(number)
        return piece_set(here)

    def _on_disk(self) -> PieceSet:
        made = 0
        for part in self._stored:
            made |= self._of_part[part]
        return made

    # From the sources

    async def _fetch_all(self) -> None:
        rounds = 0
        while not self._picker.is_done or self._tasks:
            missing = self._picker.missing
            self._news.clear()
            self._ask()
            if self._error is not None:
                raise self._error
            if self._tasks:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._news.wait()
            elif not self._picker.is_done and not self._news.is_set() and self._parents is not None:
                self._parents = None if self.clock.monotonic_s() >= self._tree_until_s else self._parents
                await self.pool.rest()
            elif not self._picker.is_done and not self._news.is_set():
                if rounds or not self.pool.peers:  # a peer may be about to announce them
                    self._check_somebody_has(missing)
                if rounds >= ROUNDS_MAX:
                    raise Unreachable(f"no source gives pieces of encoding {self._name[:12]}")
                rounds += 1
                await self.pool.rest()
            if self._picker.missing != missing:
                rounds = 0
        if self._error is not None:  # of the last piece
            raise self._error

    async def _listen(self) -> None:
        while True:
            await self.pool.changed()
            self._news.set()

    def _ask(self) -> None:
        """Request as much from every awake source as the picker assigns to it."""
        now_s = self.clock.monotonic_s()
        only = self._parents if now_s < self._tree_until_s else None
        ready = {named.name: named for named in self.pool.ready() if only is None or named.name in only}
        for name in self._picker.sources:
            if name not in ready:
                self._picker.remove(name)
        for name, named in ready.items():
            if name not in self._picker.sources:
                self._picker.add(name, is_fallback=named.kind is SourceKind.ORIGIN)
            has = named.has.get(self._name, 0) if named.kind is SourceKind.PEER else span(0, len(self._pieces))
            self._picker.has(name, has & ~self._absent.get(name, 0))
        for name, named in ready.items():  # after all `has`: a fallback gives what no peer has
            while self._memory_bytes < self.memory_bytes_max:
                number = self._picker.pick(name, now_s)
                if number is None:
                    break
                self._memory_bytes += self._pieces[number].size
                task = asyncio.create_task(self._piece(named, number))
                self._tasks[task] = name, number
                self._asked.add(task)
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        _, number = self._tasks.pop(task)
        self._asked.discard(task)
        self._memory_bytes -= self._pieces[number].size
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or (error if isinstance(error, Exception) else None)
        self._news.set()

    async def _piece(self, named: NamedSource, number: int) -> None:
        piece = self._pieces[number]
        entry = self.encoding.parts[piece.part]
        if self.pool.download_turn is not None:
            await self.pool.download_turn(piece.size)
        named.fetching += 1
        try:
            async with asyncio.timeout(limits.PEER_ANSWER_S_MAX):
                data = await named.source.blob(entry.digest, start=piece.start, end=piece.end)
            task = asyncio.current_task()
            assert task is not None
            self._asked.discard(task)
            stored, decoded = self._take(number, data)
            try:
                await stored
            except asyncio.CancelledError:
                decoded.cancel()  # cancels a job that has not begun
                raise
        except TimeoutError:
            self._missed(named, number, Unreachable(f"a piece took longer than {limits.PEER_ANSWER_S_MAX:.0f} s"))
            return
        except (PeerError, Unreachable) as error:
            if named.kind is not SourceKind.PEER and isinstance(error, PeerError):
                await self._blame(named, piece, error)
            self._missed(named, number, error)
            return
        finally:
            named.fetching -= 1
        self.received[named.name] = self.received.get(named.name, 0) + len(data)
        if not self._picker.have >> number & 1:  # otherwise another source was faster
            self._arrived(named, number, len(data))
            of_part = self._of_part[piece.part]
            if self._picker.have & of_part == of_part and piece.part in self._stored:
                await asyncio.to_thread(self.parts.finish, entry)
        await decoded

    def _arrived(self, named: NamedSource, number: int, num_bytes: int) -> None:
        now_s = self.clock.monotonic_s()
        if named.name not in self._picker.sources:  # it began to rest meanwhile
            self._picker.add(named.name)
        self._picker.arrived(named.name, number, now_s)
        for task, (_, same) in self._tasks.items():
            if task in self._asked and same == number:
                task.cancel()
        self.pool.succeeded(named, num_bytes)
        if self._pieces[number].part in self._stored:
            self.holdings.came(self._name, number)
        self.on_bytes(num_bytes)
        self._news.set()

    def _missed(self, named: NamedSource, number: int, error: PeerError | Unreachable) -> None:
        if isinstance(error, PeerError) and error.code is ErrorCode.NOT_FOUND:
            self._absent[named.name] = self._absent.get(named.name, 0) | self._of_part[self._pieces[number].part]
        else:
            self.pool.failed(named, error)
        if named.name in self._picker.sources:  # it comes back with what it has then
            self._picker.remove(named.name)

    async def _blame(self, named: NamedSource, piece: Piece, error: PeerError) -> None:
        """Check whether a wrong piece from a permanent source is the publisher's fault.

        It is if the part has its digest and its chunks do not match those that the index names. No source can do better then,
        and the download ends with that error.
        """
        if error.code is not ErrorCode.DIGEST_MISMATCH:
            return
        entry = self.encoding.parts[piece.part]
        with contextlib.suppress(PeerError, Unreachable):
            data = await fetch_from(named.source, entry)
            try:
                await asyncio.to_thread(self._check, piece, data[piece.start : piece.end])
            except PeerError as wrong:
                self._error = PeerError(ErrorCode.CHAIN_BROKEN, f"published broken: {wrong.detail}")

    def _check_somebody_has(self, missing: PieceSet) -> None:
        """Raise PeerError(NOT_FOUND) if every permanent source lacks a piece and no peer has it."""
        lasting = self.pool.lasting
        if not lasting:
            return
        for named in lasting:
            missing &= self._absent.get(named.name, 0)
        for named in self.pool.peers:
            missing &= ~named.has.get(self._name, 0)
        if missing:
            part = self._pieces[next(members(missing))].part
            raise PeerError(ErrorCode.NOT_FOUND, f"no source has part {self.encoding.parts[part].digest[:12]} any more")

    # In threads

    async def _in_decoder(self, call: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(DECODERS, call, *arguments)

    def _take(self, number: int, data: bytes) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        """Return futures (verified and stored, decoded) of one job in a thread. Await the second only if the first succeeds."""
        loop = asyncio.get_running_loop()
        stored: asyncio.Future[None] = loop.create_future()

        def settle(error: Exception | None) -> None:
            if stored.cancelled():
                return
            stored.set_result(None) if error is None else stored.set_exception(error)

        def job() -> None:
            try:
                self._store(self._pieces[number], data)
            except Exception as error:  # noqa: BLE001 - carried over to the task
                loop.call_soon_threadsafe(settle, error)
                return
            loop.call_soon_threadsafe(settle, None)
            with self._decoding:
                if self._decoded >> number & 1:
                    return
                self._decoded |= 1 << number
            self.decode(self._pieces[number].chunks, data)

        return stored, loop.run_in_executor(DECODERS, job)

    def _check(self, piece: Piece, data: bytes | memoryview) -> None:
        check_piece(piece, data, self.index)

    def _store(self, piece: Piece, data: bytes) -> None:
        self._check(piece, data)
        if piece.part in self._stored:
            self.parts.put(self.encoding.parts[piece.part].digest, piece.start, data)
