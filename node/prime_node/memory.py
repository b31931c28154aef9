"""Check that decoded policies fit into this machine's memory. Called before tensors are allocated for signed sizes.

A few kilobytes of a checkpoint may decode to terabytes, and an audit accepts the limits of a RunSpec that its user did not name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from math import prod
from pathlib import Path

from prime_protocol.codec import DTYPES
from prime_protocol.errors import LocalError
from prime_protocol.manifest import TensorEntry

MEMORY_SHARE = 0.9
"""Share of the available memory that decoded policies may take."""
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Return the memory still available to this process, or the limit of its control group if less; None if unknown."""
    bounds = []
    with contextlib.suppress(OSError, StopIteration):
        line = next(line for line in _MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
        bounds.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit and raises ValueError
        bounds.append(int((_CGROUP / "memory.max").read_text()))
    if not bounds:  # macOS
        with contextlib.suppress(OSError, ValueError):
            bounds.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(bounds, default=None)


def raw_bytes(tensors: Iterable[TensorEntry]) -> int:
    """Return the decoded size of tensors that `check_manifest` accepted."""
    return sum(prod(entry.shape) * DTYPES[entry.dtype] for entry in tensors)


def require_room(what: str, num_bytes: int, *, held_bytes: int, bytes_max: int | None, setting: str) -> None:
    """Check that `num_bytes` more fit into memory. Raises LocalError with both sizes and the name of the setting.

    `bytes_max`, the value of `setting`, includes the `held_bytes` of policies that are decoded already. Without one, the
    memory that is available now decides.
    """
    if bytes_max is None:
        available = available_bytes()
        allowed = None if available is None else int(available * MEMORY_SHARE)
        needed, limit = num_bytes, f"{MEMORY_SHARE:.0%} of the available memory ({setting} sets another limit)"
    else:
        allowed, needed, limit = bytes_max, held_bytes + num_bytes, f"the limit {setting}"
    if allowed is not None and needed > allowed:
        raise LocalError(
            f"{what} needs {needed:,} bytes of memory ({needed / 2**30:,.1f} GiB), more than {allowed:,} "
            f"({allowed / 2**30:,.1f} GiB), which is {limit}; nothing of it was decoded"
        )
