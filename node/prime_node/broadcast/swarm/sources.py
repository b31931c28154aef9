"""Sources to fetch from, none of them trusted: which to ask next, which to rest, which to drop, what each lacks.

The coordinator and the mirrors are permanent and have everything that is published. Peers come and go (neighbours.py) and
announce what they have. A source that fails rests for a time that doubles with each failure. Jitter keeps a thousand workers
from coming back in the same second. Its reason is logged when it changes, not every time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from prime_node.broadcast.swarm.piece_sets import PieceSet
from prime_node.patience import unless
from prime_node.ports.clock import Clock
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import PartEntry
from prime_protocol.pieces import Piece

log = logging.getLogger(__name__)

REST_S_MIN, REST_S_MAX = 0.5, 60.0
RANGE_BYTES = 4 * 2**20
"""Largest range of one request for a blob, in bytes. Bytes received before a cut are kept."""
BLOB_S_MAX = 3.0
"""Seconds that a peer has for a small blob, doubled in each round; then another source is asked.

Otherwise a peer that announces an index and then sends it slowly could delay all others.
"""
LASTING_S_FACTOR = 4.0
"""The same time of a permanent source, as a multiple: it may be the only one, and the line slow."""
PEERS_FIRST_MAX = 2
"""Peers that are asked for a small blob before the permanent sources, so that several slow ones do not add up."""
BUSY_S_MAX = 2 * limits.PEER_TURN_S_MAX
"""Seconds after which a peer's refusal for lack of a free slot counts as a failure. An honest one needs PEER_TURN_S_MAX."""
ROUNDS_MAX = 8
"""Rounds over all sources before a blob is given up for now."""


class SourceKind(StrEnum):
    """Kind of a source, by what can be expected of it."""

    ORIGIN = "origin"
    """The coordinator, or another source that all peers ask. Its uplink is scarce, so peers come first."""
    MIRROR = "mirror"
    """A source that has everything, and bandwidth to spare: a CDN, a bucket, a folder."""
    PEER = "peer"
    """A source that has what it announces."""


class PeerEvents(Protocol):
    """Receiver of what a pool finds out about one kind of source: implemented by the links to peers."""

    def gave(self, named: NamedSource, num_bytes: int) -> None:
        """Record verified bytes."""

    def lied(self, named: NamedSource, error: RemoteError) -> None:
        """Record wrong bytes."""


@dataclass
class NamedSource:
    """A source and its behaviour so far."""

    name: str
    source: CheckpointSource
    kind: SourceKind = SourceKind.ORIGIN
    events: PeerEvents | None = None
    """Receiver of this source's events, if it is a linked peer."""
    has: dict[str, PieceSet] = field(default_factory=dict)
    """Pieces that a peer has announced, by the digest of the encoding's index."""
    head: int = -1
    """Newest policy that a peer has announced."""
    failures: int = 0
    """Failures in a row."""
    rests_until_s: float = 0.0
    fetching: int = 0
    """Requests in progress."""
    reason: str = ""


class SourcePool:
    """The sources in the order in which to ask them."""

    def __init__(self, sources: Sequence[tuple[str, CheckpointSource]], *, clock: Clock, rng: random.Random) -> None:
        """Start with the permanent `sources`: the first is the origin, the others are mirrors."""
        self._sources = {
            name: NamedSource(name, source, SourceKind.MIRROR if place else SourceKind.ORIGIN)
            for place, (name, source) in enumerate(sources)
        }
        self.clock = clock
        self.turnover = 0
        """Number of times that a peer was added or removed."""
        self.on_news: set[Callable[[str], None]] = set()
        """Functions that get the name of each peer that was added, removed, or announced something."""
        self._rng = rng
        self._changed = asyncio.Event()

    def ready(self) -> list[NamedSource]:
        """Return the sources that do not rest: reliable ones first, permanent ones before peers, then the least busy."""
        now_s = self.clock.monotonic_s()
        awake = [named for named in self._sources.values() if named.rests_until_s <= now_s]
        return sorted(awake, key=lambda named: (named.failures, named.kind is SourceKind.PEER, named.fetching))

    def having(self, encoding: str) -> list[NamedSource]:
        """Return the sources that do not rest. PEERS_FIRST_MAX reliable peers that have some of an encoding come first."""
        ready = self.ready()
        peers = [named for named in ready if encoding in named.has and not named.failures][:PEERS_FIRST_MAX]
        return peers + [named for named in ready if named not in peers]

    @property
    def lasting(self) -> list[NamedSource]:
        """The permanent sources."""
        return [named for named in self._sources.values() if named.kind is not SourceKind.PEER]

    @property
    def all(self) -> list[NamedSource]:
        """All sources, resting ones included."""
        return list(self._sources.values())

    @property
    def peers(self) -> list[NamedSource]:
        """The sources that are peers."""
        return [named for named in self._sources.values() if named.kind is SourceKind.PEER]

    def heard_of(self, name: str) -> Mapping[str, PieceSet]:
        """Return what a peer has announced, by encoding; nothing for a peer that is not linked."""
        named = self._sources.get(name)
        return {} if named is None else named.has

    # Peers

    def add(self, named: NamedSource) -> None:
        """Add a peer, or record its new announcement."""
        self.turnover += self._sources.get(named.name) is not named
        self._sources[named.name] = named
        self._has_news(named.name)

    def remove(self, name: str) -> None:
        """Remove a peer. Idempotent."""
        self.turnover += self._sources.pop(name, None) is not None
        self._has_news(name)

    def _has_news(self, name: str) -> None:
        for hear in self.on_news:
            hear(name)
        self.tell()

    def tell(self) -> None:
        """Wake all that wait for `changed`: a peer was added, removed, or announced something."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait until `tell` is called next."""
        await self._changed.wait()

    async def hinted(self, policy_version: int, *, is_asked: Callable[[str], bool]) -> None:
        """Wait until a peer that does not rest, and is not asked already, announces a newer policy."""
        while not any(
            named.head > policy_version and not is_asked(named.name)
            for named in self.ready()
            if named.kind is SourceKind.PEER
        ):
            await self.changed()

    # Behaviour

    def failed(self, named: NamedSource, error: Exception, *, asked_s: float) -> None:
        """Record that a request which was sent at `asked_s` has failed: the source rests.

        A wrong digest is reported to its `events`.
        """
        waited_s = self.clock.monotonic_s() - asked_s
        is_soon = named.kind is SourceKind.PEER and waited_s <= BUSY_S_MAX
        if is_soon and isinstance(error, RemoteError) and error.is_transient:
            # A peer without a free slot does nothing wrong if it says so soon.
            rest_s = min(max(error.retry_after_s or 0.0, REST_S_MIN), REST_S_MAX)
            named.rests_until_s = self.clock.monotonic_s() + rest_s
            return
        named.failures += 1
        rest_s = min(REST_S_MAX, REST_S_MIN * 2 ** min(named.failures - 1, 10)) * self._rng.uniform(0.5, 1.0)
        wished_s = error.retry_after_s if isinstance(error, RemoteError) else None
        wished_s = min(wished_s or 0.0, REST_S_MAX) * self._rng.uniform(1.0, 1.5)
        named.rests_until_s = self.clock.monotonic_s() + max(rest_s, wished_s)
        if str(error) != named.reason:
            level = logging.INFO if named.kind is SourceKind.PEER else logging.WARNING
            log.log(level, "source %s: %s; trying again in %.1f s and after", named.name, error, rest_s)
        named.reason = str(error)
        if named.events is not None and isinstance(error, RemoteError) and error.code is ErrorCode.DIGEST_MISMATCH:
            named.events.lied(named, error)

    def succeeded(self, named: NamedSource, num_bytes: int = 0) -> None:
        """Record a successful request, and `num_bytes` verified bytes."""
        if named.failures:
            log.info("source %s works again", named.name)
        named.failures, named.reason = 0, ""
        if named.events is not None and num_bytes:
            named.events.gave(named, num_bytes)

    async def rest(self) -> None:
        """Wait until a resting source is ready, or a peer was added or announced something; REST_S_MIN if none rests."""
        now_s = self.clock.monotonic_s()
        resting = [named.rests_until_s for named in self._sources.values() if named.rests_until_s > now_s]
        pause_s = max(0.05, min(resting) - now_s) if resting else REST_S_MIN
        await unless(self.changed(), self.clock.sleep(pause_s))

    async def fetch_blob(self, entry: PartEntry) -> bytes:
        """Return a small blob's bytes with the right digest, from any source; peers that announce it come first.

        Raises RemoteError(NOT_FOUND) if every permanent source answers that it lacks the blob and no peer announces it
        meanwhile. Raises Unreachable after ROUNDS_MAX rounds. A download that broke off continues only at the permanent source
        that it came from: only the whole blob has a digest, so bytes of two sources would not show which of them is wrong.
        """
        partials: dict[str, bytearray] = {}
        for round_number in range(ROUNDS_MAX):
            absent = set()
            for named in self.having(entry.digest):
                named.fetching += 1
                asked_s = self.clock.monotonic_s()
                is_peer = named.kind is SourceKind.PEER
                seconds = BLOB_S_MAX * 2**round_number * (1.0 if is_peer else LASTING_S_FACTOR)
                partial = bytearray() if is_peer else partials.setdefault(named.name, bytearray())
                try:
                    async with asyncio.timeout(seconds):
                        await _download(named.source, entry, partial)
                except TimeoutError:
                    self.failed(
                        named,
                        Unreachable(f"a blob of {entry.size} bytes took longer than {seconds:g} s"),
                        asked_s=asked_s,
                    )
                except RemoteError as error:
                    if error.code is ErrorCode.DIGEST_MISMATCH:
                        partial.clear()
                    if error.code is ErrorCode.NOT_FOUND:
                        absent.add(named.name)
                    else:
                        self.failed(named, error, asked_s=asked_s)
                except Unreachable as error:
                    self.failed(named, error, asked_s=asked_s)
                else:
                    self.succeeded(named, entry.size)
                    return bytes(partial)
                finally:
                    named.fetching -= 1
            if absent.issuperset(named.name for named in self.lasting) and (round_number or not self.peers):
                raise RemoteError(ErrorCode.NOT_FOUND, f"no source has blob {entry.digest[:12]} any more")
            await self.rest()
        raise Unreachable(f"no source serves blob {entry.digest[:12]}")


async def fetch_from(source: CheckpointSource, entry: PartEntry) -> bytes:
    """Return a blob's bytes with the right digest from one source. Raises RemoteError or Unreachable."""
    partial = bytearray()
    await _download(source, entry, partial)
    return bytes(partial)


async def _download(source: CheckpointSource, entry: PartEntry, partial: bytearray) -> None:
    """Fill `partial` up to the blob's size, then compare the digest. Raises RemoteError or Unreachable."""
    while len(partial) < entry.size:
        end = min(len(partial) + RANGE_BYTES, entry.size)
        piece = await source.blob(entry.digest, start=len(partial), end=end)
        if len(piece) != end - len(partial):
            raise RemoteError(ErrorCode.MALFORMED, f"sent {len(piece)} bytes of a range of {end - len(partial)}")
        partial += piece
    if digest_of(partial) != entry.digest:
        raise RemoteError(
            ErrorCode.DIGEST_MISMATCH, f"the received bytes of blob {entry.digest[:12]} do not match its digest"
        )


class Absences:
    """The pieces of one encoding that sources reported missing."""

    def __init__(self, encoding: str, pool: SourcePool) -> None:
        """Begin without reports. `encoding` is the digest of the index."""
        self._encoding = encoding
        self._pool = pool
        self._absent: dict[str, PieceSet] = {}

    def report(self, name: str, pieces: PieceSet) -> None:
        """Record what a source lacks."""
        self._absent[name] = self._absent.get(name, 0) | pieces

    def of(self, name: str) -> PieceSet:
        """Return what a source lacks, as far as it was reported."""
        return self._absent.get(name, 0)

    def nowhere(self, wanted: PieceSet) -> PieceSet:
        """Return those of the wanted pieces that every permanent source lacks and no peer announces."""
        lasting = self._pool.lasting
        if not lasting:
            return 0
        for named in lasting:
            wanted &= self._absent.get(named.name, 0)
        for named in self._pool.peers:
            wanted &= ~named.has.get(self._encoding, 0)
        return wanted


async def broken_publication(
    named: NamedSource, entry: PartEntry, piece: Piece, check: Callable[[Piece, bytes], None]
) -> RemoteError | None:
    """Return the error if a wrong piece from a permanent source is the publisher's fault, else None.

    It is if the part has its digest and its chunks do not match those that the index names. No source can do better then.
    """
    with contextlib.suppress(RemoteError, Unreachable, TimeoutError):
        async with asyncio.timeout(limits.PEER_ANSWER_S_MAX):
            data = await fetch_from(named.source, entry)
        try:
            await asyncio.to_thread(check, piece, data[piece.start : piece.end])
        except RemoteError as wrong:
            return RemoteError(ErrorCode.CHAIN_BROKEN, f"published damaged: {wrong.detail}")
    return None
