"""trio in a thread of its own, next to asyncio. libp2p runs on trio, the rest of a node on asyncio.

Waiting: an asyncio task in `call` waits for a trio task, a trio task in `to_asyncio` for an asyncio one; either wait carries
result, error and cancellation across. Neither loop ever blocks the other: each delegates the work and continues. The thread
ends when `main` does, when `stop` is called, or when a background task crashes. Then every `call` raises ThreadGone, so that
no task waits for an ended loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import trio

from prime_node.ports.transport import Unreachable

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ThreadGone(Unreachable):
    """A trio thread that has not started, has ended, or ended meanwhile."""


class TrioThread:
    """One trio loop. `start` and `stop` are called once each, from the asyncio loop that owns it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._crash: Exception | None = None

    @property
    def has_ended(self) -> bool:
        """Whether it ran and has ended."""
        return self._thread is not None and self._ended.done()

    async def ended(self) -> None:
        """Wait until it has ended."""
        await asyncio.shield(self._ended)

    async def start(self, main: Callable[[Callable[[], None], trio.Event], Awaitable[None]]) -> None:
        """Run `main(is_ready, stopping)` in the thread; return when it calls `is_ready`. Raises what ends it before.

        `main` returns soon after `stopping` is set; whatever then still runs is cancelled.
        """
        self._loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()

        async def root() -> None:
            self._token = trio.lowlevel.current_trio_token()
            self._stopping = trio.Event()
            async with trio.open_nursery() as self._nursery:
                await main(lambda: self._tell(ready, None), self._stopping)
                self._nursery.cancel_scope.cancel()
            if self._crash is not None:
                raise self._crash

        def turn() -> None:
            failure: BaseException | None = None
            try:
                trio.run(root)
            except BaseException as error:  # noqa: BLE001 - the edge of the thread: any error ends it, and is reported
                failure = _only(error)
            self._tell(ready, failure or ThreadGone(f"the {self._name} thread ended"))
            with contextlib.suppress(RuntimeError):  # the asyncio loop is closed: nothing waits any more
                self._loop.call_soon_threadsafe(self._end, failure)

        self._thread = threading.Thread(target=turn, name=self._name, daemon=True)
        self._thread.start()
        await ready

    async def stop(self) -> None:
        """Let `main` finish, cancel the rest and wait for the end. Idempotent."""
        if self._thread is None:
            return
        with contextlib.suppress(trio.RunFinishedError):
            assert self._token is not None
            self._token.run_sync_soon(self._stopping.set)
        await asyncio.shield(self._ended)

    async def call(self, function: Callable[_P, Awaitable[_T]], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `await function(...)` in the thread. Cancelling the caller cancels it there and waits for its end."""
        if self._token is None or self._ended.done():
            raise ThreadGone(f"the {self._name} thread is not running")
        done: asyncio.Future[None] = self._loop.create_future()
        outcome: list[_T] = []
        scope = trio.CancelScope()

        async def run() -> None:
            error: BaseException | None = ThreadGone(f"the {self._name} thread ended")
            try:
                with scope:
                    outcome.append(await function(*args, **kwargs))
                error = None if outcome else asyncio.CancelledError()
            except Exception as raised:  # noqa: BLE001 - carried over to the caller
                error = raised
            finally:
                self._tell(done, error)

        self._waiting.add(done)
        try:
            self._spawn(run)
            await asyncio.shield(done)
            return outcome[0]
        except asyncio.CancelledError:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(scope.cancel)
            await asyncio.wait([done])
            done.exception()  # retrieved: the caller is cancelled anyway
            raise
        finally:
            self._waiting.discard(done)

    def spawn(self, function: Callable[[], Awaitable[None]]) -> None:
        """Start a task in the thread without waiting for it; if it crashes, `stopping` is set.

        Does nothing once the thread has ended.
        """

        async def run() -> None:
            try:
                await function()
            except Exception as error:  # noqa: BLE001 - raised when main has parted from its peers
                self._crash = error
                self._stopping.set()

        with contextlib.suppress(ThreadGone):
            self._spawn(run)

    async def to_asyncio(self, function: Callable[_P, Awaitable[_T]], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run `await function(...)` in the asyncio loop, for a trio task."""
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        outcome: list[_T] = []
        errors: list[BaseException] = []
        tasks: list[asyncio.Task[None]] = []

        async def run() -> None:
            try:
                outcome.append(await function(*args, **kwargs))
            except BaseException as error:  # noqa: BLE001 - carried over to the trio task
                errors.append(error)
            finally:
                with contextlib.suppress(trio.RunFinishedError):
                    token.run_sync_soon(done.set)

        def begin() -> None:
            tasks.append(self._loop.create_task(run()))

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            raise ThreadGone("the asyncio loop is closed") from None
        try:
            await done.wait()
        except trio.Cancelled:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(cancel)
            raise
        if errors:
            if isinstance(errors[0], asyncio.CancelledError):
                raise ThreadGone("the asyncio task was cancelled")
            raise errors[0]
        return outcome[0]

    async def borrow(self, function: Callable[[], Awaitable[_T]], give_back: Callable[[_T], None]) -> _T:
        """Run `function` as `to_asyncio` does.

        If the caller is cancelled as the result comes, pass it to `give_back` in the asyncio loop.
        """
        given: list[_T] = []

        async def keep() -> _T:
            given.append(await function())
            return given[0]

        def unseen() -> None:  # after the cancellation has come to the asyncio task
            for one in given:
                give_back(one)

        try:
            return await self.to_asyncio(keep)
        except BaseException:
            self.soon(unseen)
            raise

    def soon(self, function: Callable[[], None]) -> None:
        """Call `function` in the asyncio loop from a trio task, without waiting."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    def _spawn(self, function: Callable[[], Awaitable[None]]) -> None:
        def begin() -> None:
            with contextlib.suppress(RuntimeError):  # closed to new tasks: the thread is ending
                if self._nursery is not None:
                    self._nursery.start_soon(function)

        assert self._token is not None
        try:
            self._token.run_sync_soon(begin)
        except trio.RunFinishedError:
            raise ThreadGone(f"the {self._name} thread ended") from None

    def _tell(self, future: asyncio.Future[None], error: BaseException | None) -> None:
        """Settle a future of the asyncio loop from the thread."""

        def settle() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            elif isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)

        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(settle)

    def _end(self, failure: BaseException | None) -> None:
        """Finish in the asyncio loop, after the thread's last message."""
        if failure is not None:
            log.error("the %s thread ended with an error", self._name, exc_info=failure)
        for future in self._waiting:
            if not future.done():
                future.set_exception(ThreadGone(f"the {self._name} thread ended"))
        self._ended.set_result(None)


def _only(error: BaseException) -> BaseException:
    """Return the error that a nursery wrapped, if it is only one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
