"""A limit on the processor time of code that cannot be trusted to end, such as a search by a regular expression."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class TooCostly(Exception):
    """The code took more processor time than it may."""


@contextlib.contextmanager
def processor_limit(seconds: float) -> Iterator[None]:
    """Raise TooCostly once this process has computed for `seconds` within the context.

    Only the main thread can be interrupted, which also holds within a search by `re`. In others there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TooCostly(f"it took more than {seconds:g} s of the processor's time")

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)
