"""The life of a role's process: one event loop, one stop event.

The first SIGINT or SIGTERM sets the stop event, and the role stops in order; a second signal, or the end of `grace_s`, cancels
it. With `stop_with_parent`, end of file on standard input acts like a signal: the pipe closes when the supervisor dies, however
that happens, so no process is orphaned.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)

INTERRUPTED = 130
"""Exit code after a second signal, or if the grace period was too short."""
REPEATED_S = 0.5
"""Time after a SIGTERM in which further ones count as the same: `timeout` sends it to a process and again to its group."""
SETTLED_S = 60.0
"""Delay before objects made by imports are frozen. A garbage collection that scans all of them would stop the loop for 0.2 s."""


def run_role(main: Callable[[asyncio.Event], Awaitable[int]], *, stop_with_parent: bool, grace_s: float) -> int:
    """Run `main(stop)` to its end and return its exit code."""
    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(
        OSError, ValueError
    ):  # two networks' connections exceed 1,024 descriptors, the usual soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_live(main, stop_with_parent=stop_with_parent, grace_s=grace_s))


async def _live(main: Callable[[asyncio.Event], Awaitable[int]], *, stop_with_parent: bool, grace_s: float) -> int:
    stop, cut = asyncio.Event(), asyncio.Event()

    stopped_s = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal stopped_s
        if stop.is_set():
            if number is signal.SIGINT or loop.time() > stopped_s + REPEATED_S:
                cut.set()
            return
        stopped_s = loop.time()
        log.info("stopping in order, within %.0f s; the same signal again (Ctrl-C) stops at once", grace_s)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    loop.call_later(SETTLED_S, gc.freeze)
    if stop_with_parent:
        threading.Thread(target=_watch_parent, args=(loop, stop), daemon=True).start()

    role = asyncio.ensure_future(main(stop))
    deadline = asyncio.create_task(_cut_after(stop, cut, grace_s))
    cutting = asyncio.create_task(cut.wait())
    await asyncio.wait({role, cutting}, return_when=asyncio.FIRST_COMPLETED)
    if not role.done():
        log.warning("stopping at once")
        role.cancel()
    deadline.cancel()
    cutting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        return await role
    return INTERRUPTED


async def _cut_after(stop: asyncio.Event, cut: asyncio.Event, grace_s: float) -> None:
    await stop.wait()
    await asyncio.sleep(grace_s)
    log.warning("not finished %.0f s after the request to stop", grace_s)
    cut.set()


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Block until standard input ends. Raw reads are used because a lock on sys.stdin would block the interpreter's shutdown."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1_024):
            pass
    with contextlib.suppress(RuntimeError):  # the loop has already ended
        loop.call_soon_threadsafe(stop.set)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
