"""The life of a role's process: one event loop, one stop event.

The first SIGTERM sets the stop event, and the role has `grace_s` to finish its work. The first SIGINT (Ctrl-C) sets it in a hurry
(patience.Stop): the role has INTERRUPT_S to leave in order. A second signal, or the end of that time, cancels the role. A role
that has not ended END_S later ends with its process: a thread in a forward pass, or an engine that starts, cannot be interrupted,
nor does a blocked event loop see the signal. A role that has failed ends with its process after FAILED_END_S. That loses nothing
that was finished, as every role may be killed at any time. With `stop_with_parent`, end of file on standard
input acts like SIGTERM: the pipe closes when the supervisor dies, however that happens, so no process is orphaned.

A service manager starts a role whose engine failed after seconds, as a new process often finds the machine in order. The role
then waits, twice as long after each further fault, so that a lasting one is no loop of restarts. In a terminal it begins at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from prime_node.cli.outcome import outcome_of, tell
from prime_node.files import write_durably
from prime_node.inside import read_regular
from prime_node.patience import Stop, causes_of
from prime_node.ports.clock import Clock
from prime_node.ports.engine import EngineFault

log = logging.getLogger(__name__)

FINAL_CODES = frozenset({0, 2, 3, 4})
"""Exit codes after which a role is not restarted: done, wrong usage, a fault of this machine or its settings, refused.
A fault that may pass has another code (outcome.py)."""
INTERRUPTED = 130
"""Exit code after a second signal, or if the grace period was too short."""
INTERRUPT_S, END_S, TERMINATED_END_S = 2.0, 1.0, 10.0
"""Time to leave in order after Ctrl-C; the time after which a role that was cancelled then ends with its process; the latter
without Ctrl-C. The end itself takes a second or two where gigabytes of memory are freed."""
FAILED_END_S = 5.0
"""Time after which a role that has failed ends with its process, while an engine still starts in a thread."""
REPEATED_S = 0.5
"""Time after a SIGTERM in which further ones count as the same: `timeout` sends it to a process and again to its group."""
SETTLED_S = 60.0
"""Delay before objects made by imports are frozen. A garbage collection that scans all of them would stop the loop for 0.2 s."""
FAULTS = "engine-faults.json"
"""File of the role's folder with the number of faults in a row and the time of the last one."""
PAUSE_S_MIN, PAUSE_S_MAX = 60.0, 3_600.0
RECOVERED_S = 3_600.0
"""Time after the pause for a fault from which the next fault counts as the first: the engine worked in between."""


def run_role(main: Callable[[asyncio.Event], Awaitable[int]], *, stop_with_parent: bool, grace_s: float) -> int:
    """Run `main(stop)` to its end and return its exit code."""
    from prime_node.adapters.name_lookups import patient_loop

    _, allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(
        OSError, ValueError
    ):  # two networks' connections exceed 1,024 descriptors, the usual soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, allowed))
    threading.excepthook = log_failed_thread
    ends = _Ends()
    try:
        with asyncio.Runner(loop_factory=patient_loop) as runner:
            try:
                return runner.run(_live(main, ends, stop_with_parent=stop_with_parent, grace_s=grace_s))
            except Exception as error:
                ends.after_failure(error)
                raise
    finally:
        ends.cancel()


def log_failed_thread(end: threading.ExceptHookArgs) -> None:
    """Log the error that ended a thread. Python's own hook prints it, so it would not be in a log of JSON lines."""
    log.error("the thread %s has ended", "" if end.thread is None else end.thread.name, exc_info=end.exc_value)


class _Ends:
    """Ends of the process that do not wait for any thread."""

    def __init__(self) -> None:
        self.code = INTERRUPTED
        self._error: Exception | None = None
        self._timers: list[threading.Timer] = []

    def after(self, seconds: float) -> None:
        """End the process after some time, unless it is cancelled before."""
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def after_failure(self, error: Exception) -> None:
        """End the process after FAILED_END_S with an expected error, unless the caller has to count it."""
        known = outcome_of(error)
        if known is not None and not any(isinstance(cause, EngineFault) for cause in causes_of(error)):
            self._error, self.code = error, known[0]
            self.after(FAILED_END_S)

    def cancel(self) -> None:
        """Forget all ends that were set."""
        for timer in self._timers:
            timer.cancel()

    def _end(self) -> None:
        said = threading.Thread(target=self._say, daemon=True)
        said.start()
        said.join(END_S)  # whatever reads the log may have stopped: then this process was blocked by that
        for child in multiprocessing.active_children():  # an engine's
            child.kill()
        os._exit(self.code)

    def _say(self) -> None:
        log.warning("a computation that cannot be interrupted still runs; the process ends without it")
        if self._error is not None:
            tell(self._error)


async def _live(
    main: Callable[[asyncio.Event], Awaitable[int]], ends: _Ends, *, stop_with_parent: bool, grace_s: float
) -> int:
    stop, cut = Stop(), asyncio.Event()
    stopped_s = 0.0

    def on_signal(number: int, frame: object) -> None:
        """Note a signal. This runs between two instructions of the main thread, whether or not the event loop is blocked."""
        nonlocal stopped_s
        is_hurry, now_s = number == signal.SIGINT, time.monotonic()
        if not (stopped_s or stop.is_set()):
            stopped_s, stop.hurry = now_s, is_hurry
            ends.after(_left_s(stop, grace_s) + (END_S if is_hurry else TERMINATED_END_S))
            wake(begin)
        elif is_hurry or now_s > stopped_s + REPEATED_S:
            ends.after(END_S)
            wake(cut.set)

    def wake(call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has already ended
            loop.call_soon_threadsafe(call)

    def begin() -> None:
        log.info(
            "stopping in order, within %.0f s; the same signal again (Ctrl-C) stops at once", _left_s(stop, grace_s)
        )
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda: None)  # wakes the loop
        signal.signal(number, on_signal)
    loop.call_later(SETTLED_S, gc.freeze)
    if stop_with_parent:
        threading.Thread(target=_watch_parent, args=(loop, stop), daemon=True).start()

    role = asyncio.ensure_future(main(stop))
    deadline = asyncio.create_task(_cut_after(stop, cut, ends, grace_s))
    cutting = asyncio.create_task(cut.wait())
    await asyncio.wait({role, cutting}, return_when=asyncio.FIRST_COMPLETED)
    if not role.done():
        log.warning("stopping at once")
        role.cancel()
    deadline.cancel()
    cutting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        ends.code = await role
    return ends.code


async def _cut_after(stop: Stop, cut: asyncio.Event, ends: _Ends, grace_s: float) -> None:
    await stop.wait()
    left_s = _left_s(stop, grace_s)
    ends.after(left_s + (END_S if stop.hurry else TERMINATED_END_S))
    await asyncio.sleep(left_s)
    log.warning("not finished %.0f s after the request to stop", left_s)
    cut.set()


def _left_s(stop: Stop, grace_s: float) -> float:
    return min(INTERRUPT_S, grace_s) if stop.hurry else grace_s


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Block until standard input ends. Raw reads are used because a lock on sys.stdin would block the interpreter's shutdown."""
    with contextlib.suppress(OSError):
        while os.read(sys.stdin.fileno(), 1_024):
            pass
    with contextlib.suppress(RuntimeError):  # the loop has already ended
        loop.call_soon_threadsafe(stop.set)


async def pause_after_faults(folder: Path, clock: Clock) -> None:
    """Wait for as long as the faults in a row require, unless this is a terminal."""
    count, at_ms = _faults(folder / FAULTS)
    ago_s = max(0.0, (clock.now_ms() - at_ms) / 1_000)
    left_s = _pause_s(count) - ago_s
    if left_s > 0 and not sys.stderr.isatty():
        log.error(
            "the engine of this machine has failed %d times in a row, last %.0f s ago: this role begins again in %.0f s. "
            "To begin now, fix what the log above says, remove %s, and restart it",
            *(count, ago_s, left_s, folder / FAULTS),
        )
        await clock.sleep(left_s)


@contextlib.contextmanager
def counted_faults(folder: Path, clock: Clock) -> Iterator[None]:
    """Count an EngineFault that ends the `with` block."""
    try:
        yield
    except Exception as error:
        if any(isinstance(cause, EngineFault) for cause in causes_of(error)):
            (count, at_ms), now_ms = _faults(folder / FAULTS), clock.now_ms()
            is_first = now_ms - at_ms > (_pause_s(count) + RECOVERED_S) * 1_000
            again = {"count": 1 if is_first else count + 1, "at_ms": now_ms}
            with contextlib.suppress(OSError):  # a full disk hides no fault of the engine
                write_durably(folder / FAULTS, json.dumps(again).encode())
        raise


def _pause_s(count: int) -> float:
    return min(PAUSE_S_MIN * 2 ** min(count - 1, 10), PAUSE_S_MAX) if count else 0.0


def _faults(file: Path) -> tuple[int, int]:
    """Return the number of faults in a row, and the time of the last one in milliseconds."""
    try:
        found = json.loads(read_regular(file, bytes_max=1_024))
        return max(0, int(found["count"])), int(found["at_ms"])
    except (OSError, ValueError, TypeError, KeyError):
        return 0, 0
