"""Retries with growing pauses, cancellable waits, a switch, and a limit on bytes per second.

Retry until there is an answer, for days if necessary; ask a second source when the first is slow; end a wait when something
else happens; wait for a switch or a rate; and choose which error to report if several tasks fail together.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from prime_node.ports.clock import Clock
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import ErrorCode, RemoteError

log = logging.getLogger(__name__)

T = TypeVar("T")
PAUSE_S_MIN, PAUSE_S_MAX = 0.25, 30.0
SAY_AGAIN_S = 30.0
"""Seconds between log lines while the reason stays the same."""
_NUMBER = re.compile(r"[0-9][0-9,.]*")
BURST_S = 0.25
"""Seconds' worth of a rate limit that may be used at once."""


class Stop(asyncio.Event):
    """A request to stop, which may be in a hurry."""

    hurry = False
    """Whether a person waits for the end, so that unfinished work is given up."""


def in_a_hurry(stop: asyncio.Event) -> bool:
    """Return whether unfinished work is to be given up."""
    return isinstance(stop, Stop) and stop.hurry


class Switch:
    """A switch, off at first. Both states can be awaited."""

    def __init__(self) -> None:
        self._on, self._off = asyncio.Event(), asyncio.Event()
        self._off.set()

    def turn(self, *, on: bool) -> None:
        """Switch on or off and wake those that wait for it."""
        (self._on if on else self._off).set()
        (self._off if on else self._on).clear()

    async def on(self) -> None:
        """Wait until it is on."""
        await self._on.wait()

    async def off(self) -> None:
        """Wait until it is off."""
        await self._off.wait()


class Backoff:
    """Growing pauses with jitter, so that many clients do not retry in the same second."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._pause_s = PAUSE_S_MIN

    def next_s(self, error: Exception) -> float:
        """Return the pause after this failure.

        A server may ask for a longer one, up to PAUSE_S_MAX; up to half as much is added, because others got the same answer.
        """
        pause_s = self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        asked_s = error.retry_after_s if isinstance(error, RemoteError) else None
        return max(pause_s, min(asked_s or 0.0, PAUSE_S_MAX) * self._rng.uniform(1.0, 1.5))


def without_numbers(reason: str) -> str:
    """Return a reason without its numbers, which change while it lasts: whether it is a new one decides what a log gets."""
    return _NUMBER.sub("", reason)


def may_pass(error: Unreachable | RemoteError) -> bool:
    """Return whether the same call, with a new signature, may succeed later, perhaps with a corrected clock."""
    return isinstance(error, Unreachable) or error.is_transient or error.code in (ErrorCode.EXPIRED, ErrorCode.REPLAYED)


async def ask_until_answered(call: Callable[[], Awaitable[T]], *, what: str, clock: Clock) -> T:
    """Return the answer of `call`, retried with growing pauses while it is unreachable or transiently refused.

    `call` makes and signs a request each time, so a refusal for its time ends once the wrong clock is corrected. Any other
    RemoteError is raised. There is no deadline: the caller cancels it to end it.
    """
    backoff = Backoff()
    since_s = clock.monotonic_s()
    said_s: float | None = None
    while True:
        try:
            answer = await call()
        except (Unreachable, RemoteError) as error:
            if not may_pass(error):
                raise
            pause_s, reason = backoff.next_s(error), str(error)
        else:
            if said_s is not None:
                log.warning("%s: answered after %.0f s", what, clock.monotonic_s() - since_s)  # as loud as the failures
            return answer
        now_s = clock.monotonic_s()
        if said_s is None or now_s - said_s >= SAY_AGAIN_S:
            log.warning("%s: %s; trying for %.0f s, next in %.1f s", what, reason, now_s - since_s, pause_s)
            said_s = now_s
        await clock.sleep(pause_s)


async def first_answer(asks: Sequence[Callable[[], Coroutine[Any, Any, T]]], *, hedge_s: float) -> T:
    """Return the first answer of several sources, and cancel the other requests.

    The next source is asked when one has failed, or when `hedge_s` seconds have passed without an answer. Raises the first
    error if all fail. There is at least one source.
    """
    running: set[asyncio.Task[T]] = set()
    errors: list[RemoteError | Unreachable] = []
    left = list(asks)
    try:
        while running or left:
            if left:
                running.add(asyncio.ensure_future(left.pop(0)()))
            pause_s = hedge_s if left else None
            done, running = await asyncio.wait(running, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
            answered = [task for task in done if not isinstance(task.exception(), RemoteError | Unreachable)]
            if answered:
                return answered[0].result()
            errors += [error for task in done if isinstance(error := task.exception(), RemoteError | Unreachable)]
        raise errors[0]
    finally:
        await cancel_all(*running)


async def first_of(*waiting: Awaitable[object]) -> None:
    """Wait until the first one is done, then cancel the others. Raises what the first one raised."""
    tasks = [asyncio.ensure_future(one) for one in waiting]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await cancel_all(*tasks)


async def at_once(work: Sequence[Callable[[], Coroutine[Any, Any, T]]], *, most: int) -> list[T]:
    """Return the results of all work, of which at most `most` runs at a time. Raises the first error, and cancels the rest."""
    room = asyncio.Semaphore(most)

    async def run(one: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with room:
            return await one()

    # No TaskGroup: up to Python 3.12, one that ends with an error forgets a cancellation, and leaves one of its own.
    tasks = [asyncio.ensure_future(run(one)) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
        failed = (task.exception() for task in tasks if task in done and not task.cancelled())
        if error := next(filter(None, failed), None):
            raise causes_of(error)[0] from None
        return [task.result() for task in tasks]
    finally:
        await cancel_all(*tasks)


async def unless(interrupt: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`; None, with `work` cancelled, if `interrupt` is done first.

    Raises what the first one raised.
    """
    doing, interrupted = asyncio.ensure_future(work), asyncio.ensure_future(interrupt)
    try:
        await asyncio.wait({doing, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        interrupted.result()
        return None
    finally:
        await cancel_all(doing, interrupted)


def causes_of(error: BaseException) -> list[BaseException]:
    """Return the errors behind a task group's, in the order in which they occurred; for any other error, itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [cause for one in error.exceptions for cause in causes_of(one)]


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class RateLimit:
    """A token bucket: bytes per second, with short bursts. 0 is no limit."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_s = 0.0
        """Time at which everything taken so far is paid for."""

    def change(self, bytes_per_s: float) -> None:
        """Change the rate. Those that wait already keep their time."""
        self.bytes_per_s = bytes_per_s

    async def take(self, num_bytes: int) -> None:
        """Wait until this many bytes may move. First come, first served."""
        if not self.bytes_per_s:
            return
        now_s = self._clock.monotonic_s()
        begins_s = max(self._free_s, now_s - BURST_S)
        taken_s = num_bytes / self.bytes_per_s
        self._free_s = begins_s + taken_s
        if begins_s > now_s:
            try:
                await self._clock.sleep(begins_s - now_s)
            except BaseException:
                # Otherwise a cancelled request would keep the others waiting.
                self._free_s -= taken_s
                raise
