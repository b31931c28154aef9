"""Several places to fetch from, none of them trusted: which one next, which one not for a while, which one never again.

The coordinator and the mirrors are there for good, and have everything that is published. Peers come and go (neighbours.py),
and say what they have. A source that fails rests for a time that doubles with each failure, with jitter, so that a thousand
workers do not come back in the same second. Its reason is logged when it changes, not every time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prime_node.broadcast.swarm.piece_sets import PieceSet
from prime_node.patience import unless
from prime_node.ports.clock import Clock
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import PartEntry

log = logging.getLogger(__name__)

REST_S_MIN, REST_S_MAX = 0.5, 60.0
RANGE_BYTES = 4 * 2**20
"""One request for a blob asks for no more; what came before a cut is kept."""
BLOB_S_MAX = 3.0
"""A peer is given so long for a small blob, and twice that in the next round; then another source is asked. Whoever announces
something and then drips could hold up everybody else with the index alone."""
ROUNDS_MAX = 8
"""Rounds over all sources before a blob is given up for now."""


class SourceKind(StrEnum):
    """What is to be expected of a source."""

    ORIGIN = "origin"
    """The coordinator, or whoever else everybody asks: its uplink is scarce, so peers come first."""
    MIRROR = "mirror"
    """Has everything, and bandwidth to spare: a CDN, a bucket, a folder."""
    PEER = "peer"
    """Has what it announces."""


@dataclass
class NamedSource:
    """A source and how it has behaved."""

    name: str
    source: CheckpointSource
    kind: SourceKind = SourceKind.ORIGIN
    has: dict[str, PieceSet] = field(default_factory=dict)
    """What a peer has announced: encodings by the digest of their index, and their pieces."""
    head: int = -1
    """The newest policy that a peer has announced."""
    failures: int = 0
    """In a row."""
    rests_until_s: float = 0.0
    fetching: int = 0
    """Requests under way."""
    reason: str = ""


class SourcePool:
    """The sources in the order in which to ask them."""

    def __init__(self, sources: Sequence[tuple[str, CheckpointSource]], *, clock: Clock, rng: random.Random) -> None:
        """`sources` are there for good: the first is the origin, the others are mirrors."""
        self._sources = {
            name: NamedSource(name, source, SourceKind.MIRROR if place else SourceKind.ORIGIN)
            for place, (name, source) in enumerate(sources)
        }
        self._clock = clock
        self._rng = rng
        self._changed = asyncio.Event()
        self.share: Callable[[str, int], tuple[float, float]] = lambda encoding, num_pieces: (0.0, 0.0)
        """The part of an encoding of so many pieces that this machine asks for first."""
        self.parents: Callable[[int], frozenset[str] | None] = lambda sent_bytes: None
        """Whom alone to ask at first for an encoding of so many bytes: our parents in the tree. None: everybody."""
        self.prepare: Callable[[], Coroutine[None, None, None]] = _nothing_to_prepare
        """Makes the links to peers ready for pieces, which are asked for soon."""
        self.download_turn: Callable[[int], Awaitable[None]] | None = None
        """Waits until so many bytes may be asked for: the owner's limit."""
        self.gave: Callable[[NamedSource, int], None] = lambda named, num_bytes: None
        """Hears of verified bytes."""
        self.lied: Callable[[NamedSource, PeerError], None] = lambda named, error: None
        """Hears of wrong bytes."""

    def ready(self) -> list[NamedSource]:
        """Those that do not rest: reliable ones first, those that are there for good before peers, then the least busy."""
        now_s = self._clock.monotonic_s()
        awake = [named for named in self._sources.values() if named.rests_until_s <= now_s]
        return sorted(awake, key=lambda named: (named.failures, named.kind is SourceKind.PEER, named.fetching))

    def having(self, encoding: str) -> list[NamedSource]:
        """Those that do not rest, peers that have something of an encoding first."""
        ready = self.ready()
        peers = [named for named in ready if encoding in named.has]
        return peers + [named for named in ready if named not in peers]

    @property
    def lasting(self) -> list[NamedSource]:
        """The sources that are there for good."""
        return [named for named in self._sources.values() if named.kind is not SourceKind.PEER]

    @property
    def all(self) -> list[NamedSource]:
        return list(self._sources.values())

    @property
    def peers(self) -> list[NamedSource]:
        return [named for named in self._sources.values() if named.kind is SourceKind.PEER]

    def heard_of(self, name: str) -> Mapping[str, PieceSet]:
        """What a peer has announced, by encoding; nothing of one that is not linked."""
        named = self._sources.get(name)
        return {} if named is None else named.has

    # Peers come and go

    def add(self, named: NamedSource) -> None:
        """A peer, or the news about one."""
        self._sources[named.name] = named
        self.tell()

    def remove(self, name: str) -> None:
        """Idempotent."""
        self._sources.pop(name, None)
        self.tell()

    def tell(self) -> None:
        """Something has changed: a peer has come, gone, or announced something."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Until `tell` is called next."""
        await self._changed.wait()

    async def hinted(self, policy_version: int) -> None:
        """Until a peer that does not rest says that it has a newer policy."""
        while not any(named.head > policy_version for named in self.ready() if named.kind is SourceKind.PEER):
            await self.changed()

    # How they behave

    def failed(self, named: NamedSource, error: Exception) -> None:
        if named.kind is SourceKind.PEER and isinstance(error, PeerError) and error.is_transient:
            # A peer that has no slot for us does nothing wrong.
            named.rests_until_s = self._clock.monotonic_s() + min(error.retry_after_s or REST_S_MIN, REST_S_MAX)
            return
        named.failures += 1
        rest_s = min(REST_S_MAX, REST_S_MIN * 2 ** min(named.failures - 1, 10)) * self._rng.uniform(0.5, 1.0)
        asked_s = error.retry_after_s if isinstance(error, PeerError) else None
        named.rests_until_s = self._clock.monotonic_s() + max(rest_s, min(asked_s or 0.0, REST_S_MAX))
        if str(error) != named.reason:
            level = logging.INFO if named.kind is SourceKind.PEER else logging.WARNING
            log.log(level, "source %s: %s; trying again in %.1f s and after", named.name, error, rest_s)
        named.reason = str(error)
        if isinstance(error, PeerError) and error.code is ErrorCode.DIGEST_MISMATCH:
            self.lied(named, error)

    def succeeded(self, named: NamedSource, num_bytes: int = 0) -> None:
        if named.failures:
            log.info("source %s is back", named.name)
        named.failures, named.reason = 0, ""
        if num_bytes:
            self.gave(named, num_bytes)

    async def rest(self) -> None:
        """Until a source that rests is ready again, or a peer has come or announced something; REST_S_MIN where none rests."""
        now_s = self._clock.monotonic_s()
        resting = [named.rests_until_s for named in self._sources.values() if named.rests_until_s > now_s]
        pause_s = max(0.05, min(resting) - now_s) if resting else REST_S_MIN
        await unless(self.changed(), self._clock.sleep(pause_s))

    async def fetch_blob(self, entry: PartEntry) -> bytes:
        """A small blob's bytes with the right digest, from whoever gives them; peers that announce it come first.

        Raises PeerError(NOT_FOUND) where every source that is there for good says that it has none, and no peer says meanwhile
        that it has; Unreachable after ROUNDS_MAX rounds.
        """
        partial = bytearray()
        for round_number in range(ROUNDS_MAX):
            absent = set()
            for named in self.having(entry.digest):
                named.fetching += 1
                seconds = BLOB_S_MAX * 2**round_number if named.kind is SourceKind.PEER else None
                try:
                    async with asyncio.timeout(seconds):
                        await _download(named.source, entry, partial)
                except TimeoutError:
                    self.failed(named, Unreachable(f"a blob of {entry.size} bytes took longer than {seconds:g} s"))
                except PeerError as error:
                    if error.code is ErrorCode.DIGEST_MISMATCH:
                        partial.clear()
                    if error.code is ErrorCode.NOT_FOUND:
                        absent.add(named.name)
                    else:
                        self.failed(named, error)
                except Unreachable as error:
                    self.failed(named, error)
                else:
                    self.succeeded(named, entry.size)
                    return bytes(partial)
                finally:
                    named.fetching -= 1
            if absent.issuperset(named.name for named in self.lasting) and (round_number or not self.peers):
                raise PeerError(ErrorCode.NOT_FOUND, f"no source has blob {entry.digest[:12]} any more")
            await self.rest()
        raise Unreachable(f"no source gives blob {entry.digest[:12]}")


async def _nothing_to_prepare() -> None:
    """Without peers."""


async def fetch_from(source: CheckpointSource, entry: PartEntry) -> bytes:
    """A blob's bytes with the right digest from one source. Raises PeerError or Unreachable."""
    partial = bytearray()
    await _download(source, entry, partial)
    return bytes(partial)


async def _download(source: CheckpointSource, entry: PartEntry, partial: bytearray) -> None:
    """Fill `partial` up to the blob's size, then compare. Raises PeerError or Unreachable."""
    while len(partial) < entry.size:
        end = min(len(partial) + RANGE_BYTES, entry.size)
        piece = await source.blob(entry.digest, start=len(partial), end=end)
        if len(piece) != end - len(partial):
            raise PeerError(ErrorCode.MALFORMED, f"sent {len(piece)} bytes of a range of {end - len(partial)}")
        partial += piece
    if digest_of(partial) != entry.digest:
        raise PeerError(ErrorCode.DIGEST_MISMATCH, f"blob {entry.digest[:12]} has other bytes than its digest says")
