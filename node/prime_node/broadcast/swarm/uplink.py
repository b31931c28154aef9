"""This machine's uplink: who is served when, how fast, how much in all, and whether at all.

Who waits for whom: an answer waits for a slot (choker.py decides whose turn it is; PEER_TURN_S_MAX at most), then for the rate
limit. The slot is given back when the answer has been written to the connection, so that `slots` is what is really under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import Callable
from pathlib import Path

from prime_node.broadcast.swarm.choker import Choker, ChokerRules, UploadTurn
from prime_node.files import replace
from prime_node.ports.clock import Clock
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, PeerError

log = logging.getLogger(__name__)

RETRY_S = 1.0
RETRY_CLOSED_S = 30.0
"""Where the owner's machine is busy, or his cap is reached."""
PACE_BYTES = 2**20
"""Of one answer that leave together under a rate limit."""
BURST_S = 0.25
"""How much of a rate limit may be used at once."""


class RateLimit:
    """A bucket of tokens: bytes per second, with short bursts. 0 is no limit."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_s = 0.0
        """When everything that was taken is paid for."""

    async def take(self, num_bytes: int) -> None:
        """Waits until so much may move. First come, first served."""
        if not self._bytes_per_s:
            return
        now_s = self._clock.monotonic_s()
        begins_s = max(self._free_s, now_s - BURST_S)
        self._free_s = begins_s + num_bytes / self._bytes_per_s
        if begins_s > now_s:
            try:
                await self._clock.sleep(begins_s - now_s)
            except BaseException:
                # Else who asks and goes away would keep the others waiting.
                self._free_s -= num_bytes / self._bytes_per_s
                raise


class DataCap:
    """Bytes that may be given away in a period of days, remembered over restarts in a small file. 0 is no cap."""

    def __init__(self, bytes_max: int, *, days: int, file: Path, clock: Clock) -> None:
        self._bytes_max = bytes_max
        self._days = days
        self._file = file
        self._clock = clock
        self._period, self.used_bytes = self._read()
        self._written_bytes = self.used_bytes

    def take(self, num_bytes: int) -> bool:
        """Count so many bytes before they are sent: answers under way together are not to go over the cap. False: no room."""
        self._turn_over()
        if self._bytes_max and self.used_bytes + num_bytes > self._bytes_max:
            return False
        self.used_bytes += num_bytes
        if self._bytes_max and (self.used_bytes - self._written_bytes > self._bytes_max // 1_000 or self.is_reached):
            self._write()
        return True

    def give_back(self, num_bytes: int) -> None:
        """Bytes that were counted, and of which none was sent."""
        self.used_bytes = max(0, self.used_bytes - num_bytes)  # a period may have ended meanwhile

    @property
    def is_reached(self) -> bool:
        self._turn_over()
        return bool(self._bytes_max) and self.used_bytes >= self._bytes_max

    def close(self) -> None:
        if self._bytes_max:
            self._write()

    def _current(self) -> int:
        return self._clock.now_ms() // (self._days * 86_400_000)

    def _turn_over(self) -> None:
        if (current := self._current()) != self._period:
            self._period, self.used_bytes, self._written_bytes = current, 0, 0

    def _read(self) -> tuple[int, int]:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            read = json.loads(self._file.read_text())
            if (read["days"], read["period"]) == (self._days, self._current()):
                return int(read["period"]), int(read["used_bytes"])
        return self._current(), 0

    def _write(self) -> None:
        self._written_bytes = self.used_bytes
        try:
            used = {"days": self._days, "period": self._period, "used_bytes": self.used_bytes}
            replace(self._file, json.dumps(used).encode())
        except OSError as error:
            log.warning("data cap %s: %s", self._file, error)


class Uplink:
    """Everything that is given to peers goes through here."""

    def __init__(
        self,
        *,
        clock: Clock,
        rules: ChokerRules | None = None,
        rate: RateLimit | None = None,
        cap: DataCap | None = None,
        may_serve: Callable[[], bool] = lambda: True,
    ) -> None:
        """`may_serve` is asked for every answer: it is how a machine serves only when it is idle."""
        self.served_bytes = 0
        self._clock = clock
        self._choker = Choker(rules)
        self._rate = rate
        self._cap = cap
        self._may_serve = may_serve
        self._requests = 0
        self._turns: dict[int, tuple[str, asyncio.Future[None]]] = {}

    def close(self) -> None:
        """Write down what the cap has counted."""
        if self._cap is not None:
            self._cap.close()

    def gave(self, peer: str, num_bytes: int) -> None:
        """A peer has given us verified bytes: it is served before those who did not."""
        self._choker.gave(peer, num_bytes, self._clock.monotonic_s())

    async def slot(self, peer: str, num_bytes: int, *, is_member: bool, network: str = "") -> Callable[[], None]:
        """A slot for an answer; what is returned gives it back, once the answer was sent. All members of one `network` have a
        share; an empty one counts for none.

        Raises PeerError(UNAVAILABLE) where there is none for this peer now.
        """
        if not self._may_serve() or (self._cap is not None and self._cap.is_reached):
            raise _does_not_serve()
        await self._turn(peer, is_member=is_member, network=network)
        first_bytes = min(num_bytes, PACE_BYTES)
        if not self._may_serve() or (self._cap is not None and not self._cap.take(first_bytes)):
            self._done(peer, 0)  # while it waited
            raise _does_not_serve()
        try:
            await self._wait_for_rate(first_bytes)
        except BaseException:
            if self._cap is not None:
                self._cap.give_back(first_bytes)
            self._done(peer, 0)
            raise
        return functools.partial(self._done, peer, num_bytes)

    async def pace(self, num_bytes: int) -> None:
        """Until so many bytes may leave. An answer of more than PACE_BYTES asks before each that follow the first, so that a long
        one does not hold up all others. Counts against the cap: an asker that goes away has used up only what was sent.

        Raises PeerError(UNAVAILABLE) where the cap is reached.
        """
        if self._cap is not None and not self._cap.take(num_bytes):
            raise _does_not_serve()
        await self._wait_for_rate(num_bytes)

    async def _wait_for_rate(self, num_bytes: int) -> None:
        if self._rate is not None:
            await self._rate.take(num_bytes)

    def _done(self, peer: str, sent_bytes: int) -> None:
        self.served_bytes += sent_bytes
        self._pass_on(self._choker.done(peer, sent_bytes, self._clock.monotonic_s()))

    async def _turn(self, peer: str, *, is_member: bool, network: str) -> None:
        self._requests += 1
        request = self._requests
        turn = self._choker.asked(peer, request, self._clock.monotonic_s(), is_member=is_member, network=network)
        if turn is UploadTurn.NOW:
            return
        if turn is UploadTurn.REFUSED:
            raise PeerError(ErrorCode.UNAVAILABLE, "too many wait here already", retry_after_s=RETRY_S)
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[request] = peer, waiting
        try:
            async with asyncio.timeout(limits.PEER_TURN_S_MAX):
                await waiting
        except BaseException as error:
            if waiting.done() and not waiting.cancelled():  # the slot came in the same moment
                self._done(peer, 0)
            else:
                self._choker.withdrawn(peer, request)
            if isinstance(error, TimeoutError):
                raise PeerError(ErrorCode.UNAVAILABLE, "no slot came free", retry_after_s=RETRY_S) from None
            raise
        finally:
            del self._turns[request]

    def _pass_on(self, request: int | None) -> None:
        while request is not None:
            peer, waiting = self._turns[request]
            if not waiting.done():
                waiting.set_result(None)
                return
            request = self._choker.done(peer, 0, self._clock.monotonic_s())  # it has just given up waiting


def _does_not_serve() -> PeerError:
    return PeerError(ErrorCode.UNAVAILABLE, "this peer does not serve at the moment", retry_after_s=RETRY_CLOSED_S)
