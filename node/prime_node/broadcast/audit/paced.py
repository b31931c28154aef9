"""A source with a minimum average rate: the defence against slow retrieval, in TUF's terms.

The HTTP client gives up a single answer that stalls or drips. A source may still answer each of many requests just fast
enough, and delay a verification for days. So the time in which at least one request is open is added up, and compared with:

    waited <= PATIENCE_S + requests x REQUEST_S + bytes / bytes_per_second_min

Time spent on the bytes between requests does not count against the source. A request that a busy server refuses is sent again:
load is no fault of what is verified. These pauses count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from prime_node.patience import Backoff
from prime_node.ports.clock import Clock
from prime_node.ports.transport import PublicSource, Unreachable
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError

PATIENCE_S = 60.0
"""Seconds allowed to every source once: to connect, and for a short disturbance."""
REQUEST_S = 0.5
"""Seconds allowed for each request: a line around the world, and a disk seek."""
BYTES_PER_SECOND_MIN = 32 * 2**10
"""Lowest average rate: a quarter of a megabit a second, too slow for checkpoints of today's size."""

BUSY = (ErrorCode.UNAVAILABLE, ErrorCode.TOO_MANY_REQUESTS)
"""Errors of a server with too much load."""

T = TypeVar("T")


class PacedSource:
    """Implementation of ports.transport.PublicSource over another one. Raises Unreachable during a wait that is too long."""

    def __init__(self, source: PublicSource, *, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._open = 0
        self._since_s = 0.0
        """Time at which the first of the open requests was sent."""
        self._waited_s = 0.0
        self._allowed_s = PATIENCE_S

    async def run_spec(self) -> Envelope:
        return await self._ask(self._source.run_spec, _size_of)

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        return await self._ask(lambda: self._source.head(wait_s=wait_s), _size_of)

    async def manifest(self, policy_version: int) -> Envelope:
        return await self._ask(lambda: self._source.manifest(policy_version), _size_of)

    async def key_ring(self, version: int) -> Envelope:
        return await self._ask(lambda: self._source.key_ring(version), _size_of)

    async def calibration(self, version: int) -> Envelope:
        return await self._ask(lambda: self._source.calibration(version), _size_of)

    async def timestamp(self) -> Envelope:
        return await self._ask(self._source.timestamp, _size_of)

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        return await self._ask(lambda: self._source.blob(digest, start=start, end=end), len)

    async def _ask(self, call: Callable[[], Awaitable[T]], size_of: Callable[[T], int]) -> T:
        """Return the answer, or raise Unreachable as soon as the allowance is used up."""
        if self._open == 0:
            self._since_s = self._clock.monotonic_s()
        self._open += 1
        self._allowed_s += REQUEST_S
        refusals: list[str] = []
        answering = asyncio.ensure_future(self._admitted(call, refusals))
        try:
            while not answering.done():
                left_s = self._allowed_s - self._so_far_s()
                if left_s <= 0:
                    if refusals:
                        raise Unreachable(f"{refusals[-1]}, for {self._so_far_s():,.0f} s: try again later")
                    raise Unreachable(
                        f"slow retrieval: less than {BYTES_PER_SECOND_MIN:,.0f} bytes a second on average after "
                        f"{self._so_far_s():,.0f} s of waiting"
                    )
                waiting = asyncio.ensure_future(self._clock.sleep(left_s))
                await asyncio.wait({answering, waiting}, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
            answer = answering.result()
            self._allowed_s += size_of(answer) / BYTES_PER_SECOND_MIN
            return answer
        finally:
            answering.cancel()
            self._open -= 1
            if self._open == 0:
                self._waited_s += self._clock.monotonic_s() - self._since_s

    async def _admitted(self, call: Callable[[], Awaitable[T]], refusals: list[str]) -> T:
        """Return the answer of a server, however busy it is, and note its refusals. Raises its other errors."""
        backoff = Backoff()
        while True:
            try:
                return await call()
            except RemoteError as error:
                if error.code not in BUSY:
                    raise
                refusals.append(error.detail)
                await self._clock.sleep(backoff.next_s(error))

    def _so_far_s(self) -> float:
        """Return the seconds in which a request was open."""
        return self._waited_s + (self._clock.monotonic_s() - self._since_s if self._open else 0.0)


def _size_of(answer: Envelope | None) -> int:
    return 0 if answer is None else len(answer.payload)
