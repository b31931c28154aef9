"""Several places to fetch from, none of them trusted: which one next, which one not for a while.

A source that fails rests for a time that doubles with each failure, with jitter, so that a thousand workers
do not come back in the same second. Its reason is logged when it changes, not every time.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

from prime_node.ports.clock import Clock
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.manifest import PartEntry

log = logging.getLogger(__name__)

REST_S_MIN, REST_S_MAX = 0.5, 60.0
RANGE_BYTES = 4 * 2**20
"""One request for a part asks for no more; what came before a cut is kept."""
ROUNDS_MAX = 8
"""Rounds over all sources before a part is given up for now."""


@dataclass
class NamedSource:
    """A source and how it has behaved."""

    name: str
    source: CheckpointSource
    failures: int = 0
    """In a row."""
    rests_until_s: float = 0.0
    fetching: int = 0
    """Requests under way."""
    reason: str = ""


class SourcePool:
    """The sources in the order in which to ask them."""

    def __init__(self, sources: Sequence[tuple[str, CheckpointSource]], *, clock: Clock, rng: random.Random) -> None:
        self._sources = [NamedSource(name, source) for name, source in sources]
        self._clock = clock
        self._rng = rng

    def ready(self) -> list[NamedSource]:
        """Those that do not rest: reliable ones first, then the least busy."""
        now_s = self._clock.monotonic_s()
        awake = [named for named in self._sources if named.rests_until_s <= now_s]
        return sorted(awake, key=lambda named: (named.failures, named.fetching))

    def failed(self, named: NamedSource, error: Exception) -> None:
        named.failures += 1
        rest_s = min(REST_S_MAX, REST_S_MIN * 2 ** min(named.failures - 1, 10)) * self._rng.uniform(0.5, 1.0)
        asked_s = error.retry_after_s if isinstance(error, PeerError) else None
        named.rests_until_s = self._clock.monotonic_s() + max(rest_s, min(asked_s or 0.0, REST_S_MAX))
        if str(error) != named.reason:
            log.warning("source %s: %s; trying again in %.1f s and after", named.name, error, rest_s)
        named.reason = str(error)

    def succeeded(self, named: NamedSource) -> None:
        if named.failures:
            log.info("source %s is back", named.name)
        named.failures, named.reason = 0, ""

    async def rest(self) -> None:
        """Until a source is ready again."""
        wakes_s = min((named.rests_until_s for named in self._sources), default=0.0)
        await self._clock.sleep(max(0.05, wakes_s - self._clock.monotonic_s()))

    async def fetch_part(self, entry: PartEntry) -> bytes:
        """A part's bytes with the right digest, from whoever gives them.

        Raises PeerError(NOT_FOUND) where every source says that it has none, Unreachable after ROUNDS_MAX
        rounds.
        """
        partial = bytearray()
        for _ in range(ROUNDS_MAX):
            asked = self.ready()
            absent = 0
            for named in asked:
                named.fetching += 1
                try:
                    await _download(named.source, entry, partial)
                except PeerError as error:
                    if error.code is ErrorCode.DIGEST_MISMATCH:
                        partial.clear()
                    if error.code is ErrorCode.NOT_FOUND:
                        absent += 1
                    else:
                        self.failed(named, error)
                except Unreachable as error:
                    self.failed(named, error)
                else:
                    self.succeeded(named)
                    return bytes(partial)
                finally:
                    named.fetching -= 1
            if absent == len(self._sources):
                raise PeerError(ErrorCode.NOT_FOUND, f"no source has part {entry.digest[:12]} any more")
            await self.rest()
        raise Unreachable(f"no source gives part {entry.digest[:12]}")


async def _download(source: CheckpointSource, entry: PartEntry, partial: bytearray) -> None:
    """Fill `partial` up to the part's size, then compare. Raises PeerError or Unreachable."""
    while len(partial) < entry.size:
        end = min(len(partial) + RANGE_BYTES, entry.size)
        piece = await source.blob(entry.digest, start=len(partial), end=end)
        if len(piece) != end - len(partial):
            raise PeerError(ErrorCode.MALFORMED, f"sent {len(piece)} bytes of a range of {end - len(partial)}")
        partial += piece
    if digest_of(partial) != entry.digest:
        raise PeerError(ErrorCode.DIGEST_MISMATCH, f"part {entry.digest[:12]} has other bytes than its digest says")
