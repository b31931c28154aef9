"""The have-set of this machine: encodings it can give to others, whole or partial, and the broadcast of its changes.

The serving side reads here; downloads write here. Changes are numbered, so that a listener that has received some of them
asks for the rest. Invariant: a piece is announced only after it was verified and is on disk.

Listeners share a beat. A line is serialised once for all listeners with the same cursor, however many they are. `_beat` waits for
a change, at most KEEP_ALIVE_S, wakes all listeners, and rests for `rest_s`, so that changes meanwhile share one line. A slow
listener misses beats; when it has read its last line, it gets everything since that line at once. It gets no line of pieces that
it has announced itself. So what lines cost a peer does not grow with the number of its listeners.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prime_node.broadcast.swarm.piece_sets import PieceSet, num_runs, runs, spans
from prime_node.ports.clock import Clock
from prime_protocol import limits
from prime_protocol.manifest import Encoding
from prime_protocol.peers import PeerUpdate
from prime_protocol.pieces import Piece

HAVE_ENCODINGS_MAX = 64
"""Encodings that are announced, the newest ones."""
UPDATES_MAX = 8_192
"""Announcements that are remembered; a listener further behind gets everything."""
log = logging.getLogger(__name__)

UPDATES_EVERY_S, LISTENER_S = 0.1, 0.01
"""Seconds between two lines to one listener, at least and for each listener. Changes in between share one line."""
KEEP_ALIVE_S = 15.0
"""Longest time between two lines, in seconds, so that both sides notice a lost link."""
LINES_MAX = 16
"""Lines cached for one beat: one for each cursor."""


@dataclass(slots=True)
class HeldEncoding:
    """One encoding of which something is stored."""

    encoding: Encoding
    pieces: Sequence[Piece]
    has: PieceSet = 0
    _ends: list[tuple[int, int]] = field(default_factory=list)
    """(part, end) of every piece, for bisection."""

    def __post_init__(self) -> None:
        self._ends = [(piece.part, piece.end) for piece in self.pieces]

    @property
    def name(self) -> str:
        """Name of the encoding: its index's digest."""
        return self.encoding.index.digest

    def has_range(self, part: int, start: int, end: int) -> bool:
        """Return whether all pieces that cover these bytes of a part have arrived."""
        place = bisect_right(self._ends, (part, start))
        while start < end:
            if not self.has >> place & 1:
                return False
            start = self._ends[place][1]
            place += 1
        return True


@dataclass(frozen=True, slots=True)
class HaveChange:
    """Changes since a cursor."""

    cursor: int
    """Cursor for the next request."""
    pieces: dict[str, PieceSet]
    """New pieces by encoding."""
    head: int
    """Newest policy whose manifest is served here, -1 before the first."""
    has_more: bool = False
    """Whether there are further changes already, for which one line has no room."""

    def is_news(self, head: int, has: Mapping[str, PieceSet]) -> bool:
        """Return whether a listener with these pieces and this head lacks anything of it."""
        return self.head != head or any(held & ~has.get(name, 0) for name, held in self.pieces.items())


class HaveSet:
    """The have-set. Used from the event loop only."""

    def __init__(self) -> None:
        self.head = -1
        self._have_set: dict[str, HeldEncoding] = {}
        self._where: dict[str, list[tuple[str, int]]] = {}
        """Encodings that contain a part, and its number there, by the part's digest."""
        self._log: list[tuple[str, PieceSet]] = []
        """Announcements, of at most PEER_UPDATE_RUNS_MAX runs each. Together they name everything that is held."""
        self._log_begins = 1  # a cursor of 0 means from the beginning
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[HeldEncoding]:
        return iter(self._have_set.values())

    def add(self, held_encoding: HeldEncoding) -> None:
        """Add an encoding of which pieces are stored or will arrive. Idempotent: the pieces are merged."""
        known = self._have_set.get(held_encoding.name)
        if known is None:
            self._have_set[held_encoding.name] = known = HeldEncoding(held_encoding.encoding, held_encoding.pieces)
            for number, part in enumerate(held_encoding.encoding.parts):
                self._where.setdefault(part.digest, []).append((held_encoding.name, number))
            while len(self._have_set) > HAVE_ENCODINGS_MAX:
                self.remove(next(iter(self._have_set)))
        self._announce(known, held_encoding.has)

    def came(self, name: str, piece: int) -> None:
        """Record that a verified piece is on disk."""
        self._announce(self._have_set[name], 1 << piece)

    def advance_head(self, policy_version: int) -> None:
        """Announce a policy whose manifest is verified and served here. An older version than the head changes nothing."""
        if policy_version > self.head:
            self.head = policy_version
            self.tell()

    def remove(self, name: str) -> None:
        """Remove an encoding that is no longer on disk."""
        held_encoding = self._have_set.pop(name, None)
        for part in () if held_encoding is None else held_encoding.encoding.parts:
            places = self._where[part.digest]
            places[:] = [place for place in places if place[0] != name]
            if not places:
                del self._where[part.digest]

    def lose(self, digest: str) -> None:
        """Remove the encodings with a part that is no longer on disk."""
        for name, _ in [*self._where.get(digest, ())]:
            self.remove(name)

    def keep_only(self, digests: set[str]) -> None:
        """Remove the encodings with blobs other than `digests`: those were removed from the disk."""
        for name in [
            one.name for one in self._have_set.values() if not {b.digest for b in one.encoding.blobs} <= digests
        ]:
            self.remove(name)

    def has_range(self, digest: str, start: int, end: int) -> bool:
        """Return whether these bytes of a part are stored and verified."""
        for name, number in self._where.get(digest, ()):
            held_encoding = self._have_set[name]
            if 0 <= start < end <= held_encoding.encoding.parts[number].size and held_encoding.has_range(
                number, start, end
            ):
                return True
        return False

    def size(self, digest: str) -> int | None:
        """Return the size of a part of which something is stored, else None."""
        places = self._where.get(digest)
        return None if not places else self._have_set[places[0][0]].encoding.parts[places[0][1]].size

    # Notifications

    def updates(self, cursor: int) -> HaveChange:
        """Return the changes since `cursor`, as many as one line may name; everything if that is too long ago or 0."""
        if not self._log_begins <= cursor <= self._end:
            everything = {name: one.has for name, one in self._have_set.items() if one.has}
            if sum(map(num_runs, everything.values())) <= limits.PEER_UPDATE_RUNS_MAX:
                return HaveChange(self._end, everything, self.head)
            cursor = self._log_begins
        fresh: dict[str, PieceSet] = {}
        room = limits.PEER_UPDATE_RUNS_MAX
        for number, (name, pieces) in enumerate(self._log[cursor - self._log_begins :], start=cursor):
            if name in self._have_set:
                room -= num_runs(pieces)  # merged, they have no more runs
                if room < 0:
                    return HaveChange(number, fresh, self.head, has_more=True)
                fresh[name] = fresh.get(name, 0) | pieces
        return HaveChange(self._end, fresh, self.head)

    async def changed(self, seen: HaveChange) -> None:
        """Wait until there is something that `seen` lacks, or `tell` is called."""
        if self._end == seen.cursor and self.head == seen.head:
            await self._changed.wait()

    @property
    def _end(self) -> int:
        return self._log_begins + len(self._log)

    def _announce(self, held_encoding: HeldEncoding, pieces: PieceSet) -> None:
        new = pieces & ~held_encoding.has
        if new:
            held_encoding.has |= new
            self._log += _entries(held_encoding.name, new)
            if len(self._log) > UPDATES_MAX:
                self._log_begins = self._end
                self._log = [entry for one in self._have_set.values() for entry in _entries(one.name, one.has)]
            self.tell()

    def tell(self) -> None:
        """Wake all listeners to look again."""
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class HaveBroadcast:
    """The state that all listeners share."""

    have_set: HaveSet
    clock: Clock
    _num_listeners: int = 0
    _beats: int = 0
    _told: asyncio.Event = field(default_factory=asyncio.Event)
    """Event of the next beat."""
    _beating: asyncio.Task[None] | None = None
    _lines: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    """Lines by the cursor asked from, and the line's own cursor and head."""
    _is_closing: bool = False

    def close(self) -> None:
        """End all listeners' streams."""
        self._is_closing = True
        self._wake()

    async def lines(self, has: Callable[[], Mapping[str, PieceSet]] = dict) -> AsyncGenerator[bytes, None]:
        """Yield lines to one listener: everything first, then changes. `has` returns what it has announced itself."""
        self._num_listeners += 1
        if self._beating is None:
            self._beating = asyncio.create_task(self._beat())
        cursor, head, sent_s = 0, -2, 0.0
        try:
            while not self._is_closing:
                beats = self._beats
                updates = self.have_set.updates(cursor)
                now_s = self.clock.monotonic_s()
                if updates.is_news(head, has()) or now_s - sent_s >= KEEP_ALIVE_S / 2:
                    yield self._line(cursor, updates)
                    head, sent_s = updates.head, now_s
                cursor = updates.cursor
                if updates.has_more:
                    await self.clock.sleep(UPDATES_EVERY_S)
                    continue
                while self._beats == beats:
                    await self._told.wait()
        finally:
            self._num_listeners -= 1
            if not self._num_listeners:
                self._beating.cancel()
                self._beating = None

    async def _beat(self) -> None:
        updates = self.have_set.updates(0)
        while True:
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(KEEP_ALIVE_S / 2):
                        await self.have_set.changed(updates)
                updates = self.have_set.updates(updates.cursor)
                self._wake()
            except Exception:  # nothing awaits this task, and every listener depends on it
                log.exception("the have-set could not be sent to the peers that listen")
            await self.clock.sleep(rest_s(self._num_listeners))

    def _wake(self) -> None:
        self._beats += 1
        self._lines.clear()
        self._told.set()
        self._told = asyncio.Event()

    def _line(self, cursor: int, updates: HaveChange) -> bytes:
        name = cursor, updates.cursor, updates.head
        line = self._lines.get(name)
        if line is None:
            line = encode_update(updates) + b"\n"
            if len(self._lines) < LINES_MAX:
                self._lines[name] = line
        return line


def _entries(name: str, pieces: PieceSet) -> list[tuple[str, PieceSet]]:
    """Return announcements of an encoding's pieces, each short enough for one line."""
    each = limits.PEER_UPDATE_RUNS_MAX
    if num_runs(pieces) <= each:
        return [(name, pieces)]
    ranges = runs(pieces)
    return [(name, spans(ranges[first : first + each])) for first in range(0, len(ranges), each)]


def rest_s(num_listeners: int) -> float:
    """Return the seconds between two lines to each of so many listeners."""
    return max(UPDATES_EVERY_S, LISTENER_S * num_listeners)


def encode_update(updates: HaveChange) -> bytes:
    """Serialise a change as one line of the protocol."""
    pieces: dict[str, tuple[tuple[int, ...], ...]] = {name: tuple(runs(held)) for name, held in updates.pieces.items()}
    return PeerUpdate(cursor=updates.cursor, head=updates.head, pieces=pieces).model_dump_json().encode()
