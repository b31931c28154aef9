"""This machine without its GPUs, so without torch, whose import takes seconds."""

from __future__ import annotations

import os
import platform

from prime_protocol.telemetry import Hardware


def machine() -> Hardware:
    """Return the kind of processor, the number of cores and the memory."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Hardware(device=platform.machine() or "unknown", cores=os.cpu_count() or 1, memory_bytes=memory_bytes)
