"""This machine's uplink: when a peer is served, how fast, how much in total, and whether at all.

Connections are slowed while packets queue on the line (yielding.py); `leave_room` looks every LOOK_S while something is served.

Waiting: an answer waits for a slot (choker.py decides the order; PEER_TURN_S_MAX at most), then for the rate limit. The slot
is returned when the answer is written to the connection, so `slots` counts what is really in progress.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from prime_node.broadcast.swarm.choker import Choker, ChokerRules, UploadTurn
from prime_node.broadcast.swarm.yielding import Yielding
from prime_node.files import replace
from prime_node.patience import RateLimit
from prime_node.ports.clock import Clock
from prime_node.ports.swarm import UploadLinks
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

log = logging.getLogger(__name__)

RETRY_S = 1.0
RETRY_CLOSED_S = 30.0
"""Retry time in seconds while the owner's machine is busy, or the data cap is reached."""
PACE_BYTES = 2**20
"""Bytes of one answer sent together under a rate limit."""
LOOK_S, LOOK_IDLE_S = 0.1, 0.5
"""Seconds between two looks at the connections while something is served, and otherwise at whether anything is."""
BUSY_S = 5.0
"""Seconds for which an answer counts as being served: the system takes all of it at once, and sends it later."""


class DataCap:
    """A cap on bytes uploaded in a period of days, kept over restarts in a small file. 0 is no cap."""

    def __init__(self, bytes_max: int, *, days: int, file: Path, clock: Clock) -> None:
        self._bytes_max = bytes_max
        self._days = days
        self._file = file
        self._clock = clock
        self._period, self.used_bytes = self._read()
        self._written_bytes = self.used_bytes

    def take(self, num_bytes: int) -> bool:
        """Count bytes before they are sent, so that concurrent answers stay under the cap. Return False if there is no room."""
        self._turn_over()
        if self._bytes_max and self.used_bytes + num_bytes > self._bytes_max:
            return False
        self.used_bytes += num_bytes
        if self._bytes_max and (self.used_bytes - self._written_bytes > self._bytes_max // 1_000 or self.is_reached):
            self._write()
        return True

    def give_back(self, num_bytes: int) -> None:
        """Subtract bytes that were counted and not sent."""
        self.used_bytes = max(0, self.used_bytes - num_bytes)  # a period may have ended meanwhile

    @property
    def is_reached(self) -> bool:
        """Whether the cap of this period is used up."""
        self._turn_over()
        return bool(self._bytes_max) and self.used_bytes >= self._bytes_max

    def close(self) -> None:
        """Write the count to disk."""
        if self._bytes_max:
            self._write()

    def _current(self) -> int:
        return self._clock.now_ms() // (self._days * 86_400_000)

    def _turn_over(self) -> None:
        if (current := self._current()) != self._period:
            self._period, self.used_bytes, self._written_bytes = current, 0, 0

    def _read(self) -> tuple[int, int]:
        try:
            read = json.loads(self._file.read_bytes())
            if (read["days"], read["period"]) == (self._days, self._current()):
                return int(read["period"]), int(read["used_bytes"])
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
            log.warning("data cap %s is damaged, so its period is counted from 0 again: %r", self._file, error)
        return self._current(), 0

    def _write(self) -> None:
        self._written_bytes = self.used_bytes
        try:
            used = {"days": self._days, "period": self._period, "used_bytes": self.used_bytes}
            replace(self._file, json.dumps(used).encode())
        except OSError as error:
            log.warning("data cap %s: %s", self._file, error)


class Uplink:
    """Gate for everything that is uploaded to peers."""

    def __init__(
        self,
        *,
        clock: Clock,
        rules: ChokerRules | None = None,
        rate: RateLimit | None = None,
        cap: DataCap | None = None,
        may_serve: Callable[[], bool] = lambda: True,
        links: UploadLinks | None = None,
    ) -> None:
        """Create the gate. `may_serve` is called for every answer: with it, a machine serves only when it is idle.

        `links` are the connections to slow down while others' packets queue behind what they send.
        """
        self.served_bytes = 0
        self._clock = clock
        self.choker = Choker(rules)
        self.rate = rate or RateLimit(0.0, clock)
        """Rate of all uploads; its owner may change it."""
        self._cap = cap
        self._may_serve = may_serve
        self.links = links
        self._requests = 0
        self._turns: dict[int, tuple[str, asyncio.Future[None]]] = {}

    def close(self) -> None:
        """Write down what the cap has counted."""
        if self._cap is not None:
            self._cap.close()

    def gave(self, peer: str, num_bytes: int) -> None:
        """Record verified bytes from a peer: it is served before those that gave none."""
        self.choker.gave(peer, num_bytes, self._clock.monotonic_s())

    async def slot(self, peer: str, num_bytes: int, *, is_member: bool, network: str = "") -> Callable[[], None]:
        """Wait for a slot, and return a function that releases it once the answer was sent.

        All members of one `network` have a share; an empty network has none. Raises RemoteError(UNAVAILABLE) if there is no
        slot for this peer now.
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
        """Wait until this many bytes may leave, and count them against the cap.

        An answer longer than PACE_BYTES calls this before each further block, so that it does not delay all others. If the
        asker withdraws, only what was sent counts. Raises RemoteError(UNAVAILABLE) if the cap is reached.
        """
        if self._cap is not None and not self._cap.take(num_bytes):
            raise _does_not_serve()
        await self._wait_for_rate(num_bytes)

    async def leave_room(self) -> NoReturn:
        """Keep the line's queue short, until cancelled. Call it only with `links`."""
        assert self.links is not None
        yielding, served_bytes, until_s = Yielding(), 0, -math.inf
        while True:
            now_s = self._clock.monotonic_s()
            if self.choker.serving or self.served_bytes != served_bytes:
                served_bytes, until_s = self.served_bytes, now_s + BUSY_S
            await self._clock.sleep(LOOK_S if now_s < until_s else LOOK_IDLE_S)
            if now_s < until_s:
                for link, bytes_per_s in yielding.look(self.links.readings(), self._clock.monotonic_s()).items():
                    self.links.limit(link, bytes_per_s)

    async def _wait_for_rate(self, num_bytes: int) -> None:
        await self.rate.take(num_bytes)

    def _done(self, peer: str, sent_bytes: int) -> None:
        self.served_bytes += sent_bytes
        self._pass_on(self.choker.done(peer, sent_bytes, self._clock.monotonic_s()))

    async def _turn(self, peer: str, *, is_member: bool, network: str) -> None:
        self._requests += 1
        request = self._requests
        turn = self.choker.asked(peer, request, self._clock.monotonic_s(), is_member=is_member, network=network)
        if turn is UploadTurn.NOW:
            return
        if turn is UploadTurn.REFUSED:
            raise RemoteError(
                ErrorCode.UNAVAILABLE, "too many requests wait at this peer already", retry_after_s=RETRY_S
            )
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns[request] = peer, waiting
        try:
            async with asyncio.timeout(limits.PEER_TURN_S_MAX):
                await waiting
        except BaseException as error:
            if waiting.done() and not waiting.cancelled():  # the slot was granted at the same time
                self._done(peer, 0)
            else:
                self.choker.withdrawn(peer, request)
            if isinstance(error, TimeoutError):
                raise RemoteError(
                    ErrorCode.UNAVAILABLE, "this peer had no free slot in time", retry_after_s=RETRY_S
                ) from None
            raise
        finally:
            del self._turns[request]

    def _pass_on(self, request: int | None) -> None:
        while request is not None:
            peer, waiting = self._turns[request]
            if not waiting.done():
                waiting.set_result(None)
                return
            request = self.choker.done(peer, 0, self._clock.monotonic_s())  # it has just given up waiting


def _does_not_serve() -> RemoteError:
    return RemoteError(
        ErrorCode.UNAVAILABLE,
        "this peer does not serve now: its data cap is reached or it is closing",
        retry_after_s=RETRY_CLOSED_S,
    )
