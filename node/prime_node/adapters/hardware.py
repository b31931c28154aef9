"""The hardware of this machine."""

from __future__ import annotations

import json

import torch

from prime_node.adapters.machine import machine
from prime_node.adapters.old_gpus import CAPABILITY_MIN, why_gpus_are_too_old
from prime_protocol.errors import LocalError
from prime_protocol.limits import NAME_CHARS_MAX
from prime_protocol.telemetry import Hardware
from prime_protocol.visible import printable


def has_gpu() -> bool:
    """Return whether torch can use a CUDA device, and has kernels for it."""
    return not why_gpus_are_too_old() and bool(torch.cuda.is_available())


def hardware() -> Hardware:
    """Return what a worker reports to its operator: the first GPU, or without one the machine."""
    if not has_gpu():
        return machine()
    found = torch.cuda.get_device_properties(0)
    device = printable(found.name, NAME_CHARS_MAX)
    return machine().model_copy(update={"device": device, "memory_bytes": int(found.total_memory)})


def gpus() -> list[tuple[int, int, int]]:
    """Return (index, free bytes, total bytes) of each GPU that torch can use. Asking takes some hundred megabytes of each."""
    if not has_gpu():
        return []
    of_use = [
        index for index in range(torch.cuda.device_count()) if torch.cuda.get_device_capability(index) >= CAPABILITY_MIN
    ]
    return [(index, *torch.cuda.mem_get_info(index)) for index in of_use]


def gpu_memory(device: str) -> tuple[int, int]:
    """Return the free and all bytes of a GPU. Raises LocalError if torch cannot use it."""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except (AssertionError, RuntimeError, ValueError) as error:  # a build of torch for CPUs asserts
        raise LocalError(f"device {device}: torch cannot use it ({error}); `prime-node doctor` tells more") from None
    return int(free), int(total)


if __name__ == "__main__":
    print(json.dumps(gpus()))
