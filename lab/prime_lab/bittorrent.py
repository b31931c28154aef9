"""The policy of a BitTorrent client, for comparison in the simulated swarm: rarest first, long queues, end game. Pure.

It follows libtorrent 2.1 with as many unchoke slots as peers. The simulator's pieces are its blocks. A torrent's piece is a group
of BLOCKS of them, hashed as a whole: a peer can pass on no block before it has all of its group.

    (1) requests open at one source: what it gives in QUEUE_S, at first QUEUE_FIRST
    (2) first the rest of a group that this source has begun, then the rarest group that no source has begun, then any free block
    (3) end game: if every block is requested, request again what others were asked for
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from prime_node.broadcast.swarm.choker import ChokerRules
from prime_node.broadcast.swarm.piece_sets import PieceCounts, PieceSet, any_of, members, span

BLOCKS = 8
"""Blocks of 32 KiB in a group of 256 KiB, the torrent's piece in scripts/bench/broadcast.py."""
BLOCK_BYTES = 2**15
QUEUE_S, QUEUE_FIRST, QUEUE_MAX = 3.0, 2, 250
"""libtorrent's request_queue_time and max_out_request_queue (500 blocks of 16 KiB)."""
EVERYONE_UNCHOKED = ChokerRules(slots=200, waiting_max=10**9, waiting_per_peer_max=10**9)


@dataclass(slots=True)
class _Source:
    announced: PieceSet = 0
    """Blocks."""
    has: PieceSet = 0
    """Groups that are complete there."""
    open: set[int] = field(default_factory=set)
    groups: PieceSet = 0
    """Groups that it has begun."""
    bytes: int = 0
    first_s: float = math.inf


class BitTorrentPicker:
    """Implementation of the simulator's picker: blocks in, blocks out."""

    def __init__(self, sizes: Sequence[int], *, rng: random.Random) -> None:
        self.have: PieceSet = 0
        self._sizes = sizes
        self._all = span(0, len(sizes))
        self._groups = [span(at, min(at + BLOCKS, len(sizes))) for at in range(0, len(sizes), BLOCKS)]
        self._rng = rng
        self._sources: dict[str, _Source] = {}
        self._counts = PieceCounts()
        self._askers: dict[int, list[str]] = {}
        self._open: PieceSet = 0
        self._begun: PieceSet = 0
        """Groups of which a block was requested or is here."""
        self._whole: PieceSet = 0
        """Groups that are here."""

    @property
    def is_done(self) -> bool:
        """Whether all blocks have arrived."""
        return self.have == self._all

    @property
    def missing(self) -> PieceSet:
        """Blocks that are not here."""
        return self._all & ~self.have

    @property
    def unasked(self) -> PieceSet:
        """Missing blocks that are not requested."""
        return self._all & ~self.have & ~self._open

    def add(self, name: str, *, has: PieceSet = 0, is_web_seed: bool = False) -> None:
        """Add a source."""
        self._sources[name] = _Source()
        self.has(name, has)

    def has(self, name: str, announced: PieceSet) -> None:
        """Record blocks of a source. Only complete groups count."""
        source = self._sources[name]
        before = source.announced
        source.announced |= announced
        for group in {block // BLOCKS for block in members(source.announced & ~before)}:
            if self._groups[group] & ~source.announced == 0:
                source.has |= 1 << group
                self._counts.add(1 << group)

    def remove(self, name: str) -> None:
        """Remove a source and free the blocks requested from it."""
        source = self._sources.pop(name)
        for block in source.open:
            self._close(name, block)
        self._counts.remove(source.has)

    def idle(self) -> list[str]:
        """Return the sources that may be asked again."""
        return [name for name, source in self._sources.items() if not source.open]

    def pick(self, name: str, now_s: float) -> int | None:
        """Return the block to request from this source now, and mark it open; None if there is none."""
        source = self._sources[name]
        if len(source.open) >= self._queue(source, now_s):
            return None
        block = self._next(source)
        if block is not None:
            source.open.add(block)
            source.groups |= 1 << block // BLOCKS
            source.first_s = min(source.first_s, now_s)
            self._askers.setdefault(block, []).append(name)
            self._open |= 1 << block
            self._begun |= 1 << block // BLOCKS
        return block

    def arrived(self, name: str, piece: int, now_s: float) -> tuple[str, ...]:
        """Record a block. Return the other sources that were asked for it."""
        source = self._sources[name]
        source.bytes += self._sizes[piece]
        others = tuple(other for other in self._askers.get(piece, ()) if other != name)
        for asker in (name, *others):
            if piece in self._sources[asker].open:
                self._sources[asker].open.remove(piece)
                self._close(asker, piece)
        self.have |= 1 << piece
        if self._groups[piece // BLOCKS] & ~self.have == 0:
            self._whole |= 1 << piece // BLOCKS
        return others

    def missed(self, name: str, piece: int) -> None:
        """Record a request that failed."""
        source = self._sources[name]
        if piece in source.open:
            source.open.remove(piece)
            self._close(name, piece)

    def _close(self, name: str, block: int) -> None:
        askers = self._askers[block]
        askers.remove(name)
        if not askers:
            del self._askers[block]
            self._open &= ~(1 << block)

    def _queue(self, source: _Source, now_s: float) -> int:
        if not source.bytes:
            return QUEUE_FIRST
        rate = source.bytes / max(0.1, now_s - source.first_s)
        return max(QUEUE_FIRST, min(QUEUE_MAX, math.ceil(rate * QUEUE_S / self._sizes[0])))

    def _next(self, source: _Source) -> int | None:
        own = self._free_in(source.groups & source.has & ~self._whole)
        if own is not None:
            return own
        if fresh := source.has & ~self._begun:
            return self._free_in(1 << any_of(self._counts.rarest(fresh), self._rng))
        wanted = source.has & ~self._whole
        if not wanted:
            return None
        free = self._free_in(wanted)
        if free is not None or self.unasked:
            return free
        again = [
            block
            for group in members(wanted)
            for block in members(self._groups[group] & ~self.have)
            if block not in source.open
        ]
        return self._rng.choice(again) if again else None

    def _free_in(self, groups: PieceSet) -> int | None:
        for group in members(groups):
            if free := self._groups[group] & ~self.have & ~self._open:
                return (free & -free).bit_length() - 1
        return None
