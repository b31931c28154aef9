"""Time in tests: one virtual clock, and waits for a condition. Nothing else in the tests sleeps (tests/test_conventions.py)."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

PAUSE_S = 0.0005
"""Real time before the virtual clock moves on, in which sockets and other processes can answer."""
TURNS = 20
"""Turns of the event loop before the virtual clock moves on, in which tasks do what they can do now."""
POLL_S = 0.002
THREADS = 4


class VirtualClock:
    """Clock (ports.clock.Clock) whose time moves to the next sleeper once no task and no thread of `asyncio.to_thread` works.

    With `tick_s`, time moves in steps of at least so many seconds, and shorter sleeps end late. So hours pass in a
    moment although some task polls every few milliseconds.
    """

    def __init__(self, *, tick_s: float = 0.0) -> None:
        self.seconds = 1_000_000.0
        self.tick_s = tick_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._is_moving = False

    def now_ms(self) -> int:
        return round(self.seconds * 1_000)

    def monotonic_s(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        threads = _counted_threads(loop)
        woken = loop.create_future()
        heapq.heappush(self._sleepers, (self.seconds + max(0.0, seconds), next(self._order), woken))
        self._move_later(threads)
        await woken

    def _move_later(self, threads: CountedThreads) -> None:
        if not self._is_moving:
            self._is_moving = True
            threads.loop.call_later(PAUSE_S, self._move, threads, TURNS)

    def _move(self, threads: CountedThreads, turns_left: int) -> None:
        """Wake the next sleeper that still waits, unless a thread works."""
        if threads.num_working:
            threads.loop.call_later(PAUSE_S, self._move, threads, TURNS)
            return
        if turns_left:
            threads.loop.call_soon(self._move, threads, turns_left - 1)
            return
        self._is_moving = False
        while self._sleepers and self._sleepers[0][2].done():  # cancelled
            heapq.heappop(self._sleepers)
        if self._sleepers:
            self.seconds = max(self._sleepers[0][0], self.seconds + self.tick_s)
        while self._sleepers and self._sleepers[0][0] <= self.seconds:
            _, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
        if self._sleepers:
            self._move_later(threads)


class CountedThreads(ThreadPoolExecutor):
    """Threads of an event loop that say how many calls are unfinished."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(THREADS)
        self.loop = loop
        self.num_working = 0

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.num_working += 1
        future = super().submit(call, *args, **kwargs)
        future.add_done_callback(self._finished)
        return future

    def _finished(self, _: Future[Any]) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._count_down)

    def _count_down(self) -> None:
        self.num_working -= 1


_THREADS: WeakKeyDictionary[asyncio.AbstractEventLoop, CountedThreads] = WeakKeyDictionary()


def _counted_threads(loop: asyncio.AbstractEventLoop) -> CountedThreads:
    """Return the counted threads of an event loop, made when a virtual clock is first used in it."""
    if loop not in _THREADS:
        _THREADS[loop] = CountedThreads(loop)
        loop.set_default_executor(_THREADS[loop])
    return _THREADS[loop]


async def until(condition: Callable[[], object], *, seconds: float = 20.0) -> None:
    """Let other tasks run until a condition holds that no event announces."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(POLL_S)


def wait_until(condition: Callable[[], object], *, seconds: float = 60.0) -> None:
    """Wait until a condition holds that other processes or threads bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {seconds:.0f} s"
        time.sleep(POLL_S)


async def turns(count: int = TURNS) -> None:
    """Let the event loop turn a few times: what was sent over loopback within this process has been read then."""
    for _ in range(count):
        await asyncio.sleep(0)


async def be_slow(seconds: float) -> None:
    """Play a peer that needs this long. Do not wait with it for what the code under test does."""
    await asyncio.sleep(seconds)
