"""The hardware of this machine."""

from __future__ import annotations

import os
import platform

import torch

from prime_protocol.limits import NAME_CHARS_MAX
from prime_protocol.telemetry import Hardware
from prime_protocol.visible import printable


def has_gpu() -> bool:
    """Return whether torch can use a CUDA device."""
    return bool(torch.cuda.is_available())


def hardware() -> Hardware:
    """Return what a worker reports to its operator."""
    cores = os.cpu_count() or 1
    if has_gpu():
        found = torch.cuda.get_device_properties(0)
        return Hardware(device=printable(found.name, NAME_CHARS_MAX), cores=cores, memory_bytes=int(found.total_memory))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(device=platform.machine() or "unknown", cores=cores, memory_bytes=memory_bytes)
