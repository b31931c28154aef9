"""An asyncio loop on virtual time: when all tasks wait, its clock jumps to the next timer. Calls of `to_thread` run at once.

So the same coroutines give the same run, and hours pass in milliseconds. Sockets are not served;
connections within the loop are, with `tcp`.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar, TypeVarTuple, Unpack

from prime_lab.virtual_tcp import VirtualTcp

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")


class DeadlockError(RuntimeError):
    """Every task waits for another one."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop. Its time begins at 0."""

    def __init__(self, tcp: VirtualTcp | None = None) -> None:
        self._now_s, self._tcp = 0.0, tcp
        super().__init__(_Jumping(self))
        self.set_default_executor(_AtOnce())

    def time(self) -> float:
        """Return the virtual seconds."""
        return self._now_s

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Call at once, whatever the executor: a thread would run in real time."""
        return asyncio.wrap_future(_AtOnce().submit(func, *args), loop=self)

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Open a connection within the loop. Raises ConnectionRefusedError."""
        assert self._tcp is not None, "this loop has no connections"
        return await self._tcp.connect(protocol_factory, host, port)

    def jump(self, seconds: float) -> None:
        """Move the time on."""
        self._now_s += seconds


class _Jumping(selectors.SelectSelector):
    """A selector that moves a loop's time on instead of waiting. It looks at no file: no other thread wakes the loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError(f"at {self._loop.time():.1f} s every task waits for another one")
        if timeout:
            self._loop.jump(timeout)
        return []


class _AtOnce(ThreadPoolExecutor):
    """An executor without threads."""

    def __init__(self) -> None:
        super().__init__(1)

    def submit(self, call: Callable[..., _T], /, *arguments: Any, **named: Any) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(call(*arguments, **named))
        except Exception as error:  # noqa: BLE001 (it belongs to the caller)
            future.set_exception(error)
        return future


def run_virtually(main: Coroutine[Any, Any, _T], tcp: VirtualTcp | None = None) -> _T:
    """Run a coroutine to its end on a loop of its own, without collecting garbage meanwhile."""
    loop = VirtualLoop(tcp)
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        return loop.run_until_complete(main)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        if was_collecting:
            gc.enable()
