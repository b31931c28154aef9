"""Measure the processor time that one coroutine takes of its event loop's thread, without its waits.

The wall clock would not do: a request that waits costs nothing, and on a busy machine other processes' time would count. The
time of other threads is not included, such as that of file and database reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Meter:
    """The processor time of one connection. `spend` receives each part of it in seconds, soon after it was used."""

    __slots__ = ("_since_s", "_spend")

    def __init__(self, spend: Callable[[float], None]) -> None:
        self._spend = spend
        self._since_s: float | None = None
        """Time from which on nothing was reported; None outside of the connection's code."""

    def report(self) -> None:
        """Report the time used until now."""
        if self._since_s is not None:
            before_s, self._since_s = self._since_s, time.thread_time()
            self._spend(self._since_s - before_s)

    def call(self, function: Callable[[bytes], None], data: bytes) -> None:
        """Call a function and measure it."""
        is_outermost = self._since_s is None
        if is_outermost:
            self._since_s = time.thread_time()
        try:
            function(data)
        finally:
            if is_outermost:
                self.report()
                self._since_s = None

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and measure each of its steps."""
        return await _Steps(self, coroutine)

    def step(self, send: Callable[[], Any]) -> Any:
        """Run one step of the coroutine. Raises StopIteration at its end, and what it raises."""
        self._since_s = time.thread_time()
        try:
            return send()
        finally:
            self.report()
            self._since_s = None


class _Steps(Generic[T]):
    def __init__(self, meter: Meter, coroutine: Coroutine[Any, Any, T]) -> None:
        self._meter, self._coroutine = meter, coroutine

    def __await__(self) -> Generator[Any, Any, T]:
        send = partial(self._coroutine.send, None)
        while True:
            try:
                waited_for = self._meter.step(send)
            except StopIteration as ended:
                result: T = ended.value
                return result
            try:
                yield waited_for
                send = partial(self._coroutine.send, None)
            except BaseException as raised:  # noqa: BLE001 - the coroutine decides, as with `yield from`
                send = partial(self._coroutine.throw, raised)
