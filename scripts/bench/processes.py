"""Processes that benchmarks start and measure, as Linux counts them."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SPAWN = multiprocessing.get_context("spawn")


def pin(core: int | None) -> None:
    """Keep this process on one core."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def use_fast_loop() -> None:
    """Use uvloop if it is installed, as the roles do."""
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())


@contextlib.contextmanager
def started(target: Callable[..., None], *arguments: object) -> Iterator[tuple[Any, int]]:
    """Run a function in a process, with a pipe as its last argument; yield what it sends first, and the process's id."""
    here, there = multiprocessing.Pipe()
    process = SPAWN.Process(target=target, args=(*arguments, there), daemon=True)
    process.start()
    try:
        assert here.poll(60.0), f"{target.__name__} did not start"
        assert process.pid is not None
        yield here.recv(), process.pid
    finally:
        process.kill()
        process.join()


def processor_s(pid: int) -> float:
    """Return the processor time of a process in seconds. /proc counts it in steps of 10 ms."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3), which Python lacks


def resident_bytes(pid: int | str) -> int:
    """Return the resident memory of a process; of this one for "self"."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
