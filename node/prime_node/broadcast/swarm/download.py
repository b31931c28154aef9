"""Download of one encoding from all sources at once.

Waiting: `run` asks every source that has room for the piece that the picker names. It waits until a piece has arrived, a source
with room has announced more, or TICK_S have passed (work is stolen from silent sources). Between two such looks it asks only
sources that announce more or have given something. Most announcements wake nothing. Each piece is fetched by a task of its own.
A job in a thread then verifies, stores and decodes it (piece_decoder.py). Pieces in memory are bounded, those queued for the
decoder included.

Invariant: nothing is stored, announced or decoded before each of its chunks matched its digest. A wrong piece is attributed
exactly, since a piece comes from one source and is hashed alone.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from prime_node.broadcast.swarm.have_set import HaveSet, HeldEncoding
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.picker import Picker, PickerRules
from prime_node.broadcast.swarm.piece_decoder import Decode, PieceDecoder
from prime_node.broadcast.swarm.piece_sets import PieceSet, members, span
from prime_node.broadcast.swarm.sources import (
    ROUNDS_MAX,
    Absences,
    NamedSource,
    SourceKind,
    SourcePool,
    broken_publication,
)
from prime_node.patience import RateLimit, cancel_all
from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.chunk_index import ChunkIndex, open_index
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import Encoding, Manifest
from prime_protocol.pieces import cut_pieces

TICK_S = 0.1
"""Seconds between looks at all sources, to take over a silent one's work."""
TREE_S_MAX = 2.0
"""Seconds for which our parents alone are asked where an encoding goes down the tree; then all peers are."""

PIECES_BYTES_MAX = 64 * 2**20
"""Memory for pieces during one download."""


class DownloadPlan(Protocol):
    """The choices of one machine among many that download the same encoding: implemented by the links to peers."""

    def share(self, encoding: str, num_pieces: int) -> tuple[float, float]:
        """Return the part that this machine requests first, of an encoding with this many pieces."""

    def parents(self, sent_bytes: int) -> frozenset[str] | None:
        """Return the peers to ask exclusively at first for this many bytes: our parents in the tree. None: all peers."""

    async def prepare(self) -> None:
        """Prepare the links to peers for requests that come soon."""


class NoPeers:
    """Implementation of DownloadPlan for a machine without links to peers."""

    def share(self, encoding: str, num_pieces: int) -> tuple[float, float]:
        """Return an empty part: no other machine requests the rest."""
        return 0.0, 0.0

    def parents(self, sent_bytes: int) -> frozenset[str] | None:
        """Return None: all sources are asked."""
        return None

    async def prepare(self) -> None:
        """Do nothing."""


@dataclass
class Downloads:
    """Parts that all downloads of one machine share, and their start."""

    pool: SourcePool
    parts: PartStore
    have_set: HaveSet
    clock: Clock
    rng: random.Random
    memory_bytes_max: int = PIECES_BYTES_MAX
    """Memory for pieces during one download, those queued for the decoder included."""
    plan: DownloadPlan = field(default_factory=NoPeers)
    rate: RateLimit | None = None
    """Limit on requested bytes per second, if the owner set one."""
    rules: PickerRules = field(default_factory=PickerRules)
    received: dict[str, int] = field(default_factory=dict)
    """Bytes of pieces received so far, by source, duplicates included."""

    async def fetch(
        self,
        manifest: Manifest,
        encoding: Encoding,
        begin: Callable[[ChunkIndex], Awaitable[Decode]],
        *,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Fetch an encoding: its index, from the disk or a source, then its parts into the function that `begin` returns.

        `on_bytes` gets the number of verified bytes, from the disk or from a source. Raises what `Download.run` raises,
        RemoteError for an index that does not match the manifest, and Unreachable if a file is removed meanwhile.
        """
        preparing = asyncio.create_task(self.plan.prepare())  # connections are there when the index is
        try:
            is_here = self.parts.has(encoding.index.digest)  # a turn of a thread takes long on a busy machine
            packed = await asyncio.to_thread(self.parts.read, encoding.index) if is_here else None
            if packed is None:
                packed = await self.pool.fetch_blob(encoding.index)
                await asyncio.to_thread(self.parts.write, encoding.index.digest, packed)
            index = open_index(packed, encoding, manifest.tensors)
            on_bytes(encoding.index.size)
            await Download(self, encoding, index, await begin(index), on_bytes).run()
        except FileNotFoundError as error:
            raise Unreachable(f"{error.filename} was removed by another program; fetching it again") from None
        finally:
            await cancel_all(preparing)


class Download:
    """One download. Call `run` once."""

    def __init__(
        self,
        shared: Downloads,
        encoding: Encoding,
        index: ChunkIndex,
        decode: Decode,
        on_bytes: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        self._shared = shared
        self._pool = shared.pool
        self._clock = shared.clock
        self._encoding = encoding
        self._on_bytes = on_bytes
        self._pieces = cut_pieces(encoding, index)
        self._name = encoding.index.digest
        self._decoder = PieceDecoder(encoding, index, self._pieces, shared.parts, decode)
        self._absences = Absences(self._name, shared.pool)
        self._tasks: dict[asyncio.Task[None], tuple[str, int]] = {}
        self._asked: set[asyncio.Task[None]] = set()
        """Tasks that wait for a source; the others verify, store or decode."""
        self._memory_bytes = 0
        self._ready: dict[str, NamedSource] = {}
        """Sources that did not rest at the last look at all of them."""
        self._look_s, self._turnover = -math.inf, -1
        """Time of the next such look, and the pool's turnover at the last."""
        self._heard: dict[str, PieceSet] = {}
        """Pieces that the picker knows of each source."""
        self._freed: dict[str, None] = {}
        """Sources that have announced more since they were asked, or of which a request has ended, in this order."""
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    async def run(self) -> None:
        """Download until everything is decoded.

        Raises RemoteError(NOT_FOUND) if no source has a piece any more, another RemoteError if verified bytes do not decode,
        Unreachable if no source gives anything for long, OSError from the disk.
        """
        shared = self._shared
        have = await self._decoder.restore(self._on_bytes)
        shared.have_set.add(HeldEncoding(self._encoding, self._pieces, have & self._decoder.storable))
        sizes = [piece.size for piece in self._pieces]
        share = shared.plan.share(self._name, len(sizes))
        self._picker = Picker(sizes, rng=shared.rng, rules=shared.rules, have=have, share=share)
        self._parents = shared.plan.parents(self._encoding.sent_bytes)
        self._tree_until_s = self._clock.monotonic_s() + TREE_S_MAX
        self._pool.on_news.add(self._has_news)
        try:
            await self._fetch_all()
        finally:
            self._pool.on_news.discard(self._has_news)
            await cancel_all(*self._tasks)

    # From the sources

    async def _fetch_all(self) -> None:
        rounds = 0
        while not self._picker.is_done or self._tasks:
            missing = self._picker.missing
            self._changed.clear()
            self._ask()
            if self._error is not None:
                raise self._error
            if self._tasks:
                try:
                    async with asyncio.timeout(TICK_S):
                        await self._changed.wait()
                except TimeoutError:
                    self._look_s = -math.inf
            elif not self._picker.is_done and not self._changed.is_set() and self._parents is not None:
                self._parents = None if self._clock.monotonic_s() >= self._tree_until_s else self._parents
                await self._pool.rest()
            elif not self._picker.is_done and not self._changed.is_set():
                if rounds or not self._pool.peers:  # a peer may be about to announce them
                    self._require_sources(missing)
                if rounds >= ROUNDS_MAX:
                    raise Unreachable(f"no source serves pieces of encoding {self._name[:12]}")
                rounds += 1
                await self._pool.rest()
            if self._picker.missing != missing:
                rounds = 0
        if self._error is not None:  # of the last piece
            raise self._error

    def _has_news(self, name: str) -> None:
        """Wake `run` if a peer was added or removed, or announces more and has room for a request."""
        named = self._ready.get(name)
        if named is None or self._pool.turnover != self._turnover or self._look_s == -math.inf:
            self._changed.set()  # all sources are looked at
        elif self._hear(named) and self._picker.has_room(name):
            self._freed[name] = None
            self._changed.set()

    def _ask(self) -> None:
        """Request as much from awake sources as the picker assigns to them: from all at a look, else from changed ones."""
        now_s = self._clock.monotonic_s()
        if not self._tasks or now_s >= self._look_s or self._pool.turnover != self._turnover:
            self._look(now_s)
            chosen = list(self._ready.values())
        else:
            chosen = [named for name in self._freed if (named := self._ready.get(name)) is not None]
        self._freed.clear()
        for named in chosen:  # after all `has`: a fallback gives what no peer has
            while self._memory_bytes < self._shared.memory_bytes_max:
                number = self._picker.pick(named.name, now_s)
                if number is None:
                    break
                self._memory_bytes += self._pieces[number].size
                task = asyncio.create_task(self._piece(named, number))
                self._tasks[task] = named.name, number
                self._asked.add(task)
                task.add_done_callback(self._ended)
            else:
                self._look_s = -math.inf

    def _look(self, now_s: float) -> None:
        """Find the sources that do not rest, and all that they have."""
        self._look_s, self._turnover = now_s + TICK_S, self._pool.turnover
        only = self._parents if now_s < self._tree_until_s else None
        self._ready = {named.name: named for named in self._pool.ready() if only is None or named.name in only}
        known = set(self._picker.sources)
        for name in known - self._ready.keys():
            self._picker.remove(name)
        for name, named in self._ready.items():
            if name not in known:
                self._add(named)
            self._hear(named)

    def _add(self, named: NamedSource) -> None:
        self._picker.add(named.name, is_web_seed=named.kind is SourceKind.ORIGIN)
        self._heard.pop(named.name, None)

    def _hear(self, named: NamedSource) -> bool:
        """Pass on what a source has. Return whether that is new."""
        has = named.has.get(self._name, 0) if named.kind is SourceKind.PEER else span(0, len(self._pieces))
        if has == self._heard.get(named.name):
            return False
        self._heard[named.name] = has
        self._picker.has(named.name, has & ~self._absences.of(named.name))
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        _, number = self._tasks.pop(task)
        self._asked.discard(task)
        self._memory_bytes -= self._pieces[number].size
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or (error if isinstance(error, Exception) else None)
        if self._error is not None or not self._tasks or self._look_s == -math.inf:
            self._changed.set()

    async def _piece(self, named: NamedSource, number: int) -> None:
        piece, task = self._pieces[number], asyncio.current_task()
        entry = self._encoding.parts[piece.part]
        assert task is not None
        if self._shared.rate is not None:
            await self._shared.rate.take(piece.size)
        named.fetching += 1
        asked_s = self._clock.monotonic_s()
        try:
            async with asyncio.timeout(limits.PEER_ANSWER_S_MAX):
                data = await named.source.blob(entry.digest, start=piece.start, end=piece.end)
            self._asked.discard(task)
            stored, decoded = self._decoder.take(number, data)
            try:
                await stored
            except asyncio.CancelledError:
                decoded.cancel()  # cancels a job that has not begun
                raise
        except TimeoutError:
            slow = Unreachable(f"a piece took longer than {limits.PEER_ANSWER_S_MAX:.0f} s")
            self._missed(named, number, slow, asked_s)
            return
        except (RemoteError, Unreachable) as error:
            is_wrong = isinstance(error, RemoteError) and error.code is ErrorCode.DIGEST_MISMATCH
            if is_wrong and named.kind is not SourceKind.PEER:
                self._asked.add(task)  # the piece may come from another source first
                self._error = await broken_publication(named, entry, piece, self._decoder.check) or self._error
            self._missed(named, number, error, asked_s)
            return
        finally:
            named.fetching -= 1
        received = self._shared.received
        received[named.name] = received.get(named.name, 0) + len(data)
        if not self._picker.have >> number & 1:  # otherwise another source was faster
            self._arrived(named, number, len(data))
            await self._decoder.finish(piece.part, self._picker.have)
        await decoded

    def _arrived(self, named: NamedSource, number: int, num_bytes: int) -> None:
        now_s = self._clock.monotonic_s()
        if named.name not in self._picker.sources:  # it began to rest meanwhile
            self._add(named)
        self._freed |= dict.fromkeys((named.name, *self._picker.arrived(named.name, number, now_s)))
        for task, (_, same) in self._tasks.items():
            if task in self._asked and same == number:
                task.cancel()
        self._pool.succeeded(named, num_bytes)
        if self._decoder.is_storable(number):
            self._shared.have_set.came(self._name, number)
        self._on_bytes(num_bytes)
        self._changed.set()

    def _missed(self, named: NamedSource, number: int, error: RemoteError | Unreachable, asked_s: float) -> None:
        if isinstance(error, RemoteError) and error.code is ErrorCode.NOT_FOUND:
            self._absences.report(named.name, self._decoder.of_part[self._pieces[number].part])
        else:
            self._pool.failed(named, error, asked_s=asked_s)
        if named.name in self._picker.sources:  # it comes back with what it has then
            self._picker.remove(named.name)
        self._look_s = -math.inf

    def _require_sources(self, missing: PieceSet) -> None:
        """Raise RemoteError(NOT_FOUND) if every permanent source lacks a piece and no peer has it."""
        if nowhere := self._absences.nowhere(missing):
            part = self._pieces[next(members(nowhere))].part
            raise RemoteError(
                ErrorCode.NOT_FOUND, f"no source has part {self._encoding.parts[part].digest[:12]} any more"
            )
