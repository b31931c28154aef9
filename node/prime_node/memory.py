"""Check that decoded policies fit into this machine's memory. Called before tensors are allocated for signed sizes.

A few kilobytes of a checkpoint may decode to terabytes, and an audit accepts the limits of a RunSpec that its user did not name.
What never fits is refused at once. A process that follows a run waits for what does not fit now: other programs may free memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path
from typing import NamedTuple

from prime_node.ports.clock import Clock
from prime_protocol.codec import DTYPES
from prime_protocol.errors import LocalError
from prime_protocol.manifest import TensorEntry

log = logging.getLogger(__name__)

MEMORY_SHARE = 0.9
"""Share of the available memory that decoded policies may take."""
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_TOTAL, _AVAILABLE = "MemTotal:", "MemAvailable:"
ROOM_S_MAX, ROOM_PAUSE_S = 300.0, 5.0
"""Longest wait for other programs to free memory, and the time between two looks."""


class MachineMemory(NamedTuple):
    """Memory of this machine, or of this process's control group if less, in bytes. None if unknown."""

    total: int | None
    available: int | None


def machine_memory() -> MachineMemory:
    """Measure the memory, and what of it is available now."""
    known: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        rows = (line.split() for line in _MEMINFO.read_text().splitlines())
        known = {row[0]: int(row[1]) * 1024 for row in rows if row[0] in (_TOTAL, _AVAILABLE)}
    bounds = []
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit and raises ValueError
        bounds.append(int((_CGROUP / "memory.max").read_text()))
    if not known and not bounds:  # macOS
        with contextlib.suppress(OSError, ValueError):
            bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    total, available = ([known[name]] if name in known else [] for name in (_TOTAL, _AVAILABLE))
    return MachineMemory(min(bounds + total, default=None), min(bounds + available, default=None))


def available_bytes() -> int | None:
    """Return the memory still available to this process, or the limit of its control group if less; None if unknown."""
    return machine_memory().available


def raw_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Return the decoded size of tensors that `check_manifest` accepted."""
    return sum(prod(entry.shape) * DTYPES[entry.dtype] for entry in tensors)


class MemoryShort(LocalError):
    """Memory that is used by other programs now. The machine has enough of it."""


def require_room(
    what: str,
    num_bytes: int,
    *,
    held_bytes: int,
    bytes_max: int | None,
    setting: str,
    measured: Callable[[], MachineMemory] | None = None,
) -> None:
    """Check that `num_bytes` more fit into memory. Raises LocalError with both sizes and the name of the setting.

    `bytes_max`, the value of `setting`, includes the `held_bytes` of policies that are decoded already. Without one, the
    memory that is available now decides; if the machine has more, the error is MemoryShort.
    """
    memory = machine_memory() if measured is None else measured()
    if bytes_max is None:
        allowed = None if memory.available is None else int(memory.available * MEMORY_SHARE)
        needed, limit = num_bytes, f"{MEMORY_SHARE:.0%} of the available memory ({setting} sets another limit)"
    else:
        allowed, needed, limit = bytes_max, held_bytes + num_bytes, f"the limit {setting}"
    if allowed is None or needed <= allowed:
        return
    is_short = bytes_max is None and held_bytes + num_bytes <= MEMORY_SHARE * (memory.total or 0)
    raise (MemoryShort if is_short else LocalError)(
        f"{what} needs {needed:,} bytes of memory ({needed / 2**30:,.1f} GiB), more than {allowed:,} "
        f"({allowed / 2**30:,.1f} GiB), which is {limit}; nothing of it was decoded"
    )


async def until_room(check: Callable[[], None], *, clock: Clock) -> None:
    """Call `check` until it raises no MemoryShort; raise it after ROOM_S_MAX."""
    began_s = clock.monotonic_s()
    is_said = False
    while True:
        try:
            check()
        except MemoryShort as short:
            if clock.monotonic_s() - began_s >= ROOM_S_MAX:
                raise
            if not is_said:
                log.warning("%s; waiting up to %.0f s for other programs to free memory", short, ROOM_S_MAX)
            is_said = True
        else:
            if is_said:
                log.warning("there is enough memory after %.0f s", clock.monotonic_s() - began_s)
            return
        await asyncio.to_thread(return_free_memory)
        await clock.sleep(ROOM_PAUSE_S)


def return_free_memory() -> None:
    """Return to the system what this process has freed. glibc keeps most of it in each thread's arena. Elsewhere do nothing."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
