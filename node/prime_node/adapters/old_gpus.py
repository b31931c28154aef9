"""GPUs that torch has no kernels for. Standard library only: scripts/setup_machine.py runs this file before any installation."""

from __future__ import annotations

import platform
import shutil
import subprocess
from functools import cache

CAPABILITY_MIN = (8, 0) if platform.machine() == "aarch64" else (7, 5)
"""Lowest compute capability in torch 2.13 for CUDA 13 (torch.cuda.PYTORCH_RELEASES_CODE_CC), so in vLLM 0.32 too. Driver 580
still runs older ones."""
ASKED = ("--query-gpu=compute_cap,name", "--format=csv,noheader")
ASKED_S_MAX = 20


def why_gpus_are_too_old() -> str:
    """Return why no GPU of this machine is of use; "" if one may be new enough, or the driver does not tell."""
    program = shutil.which("nvidia-smi")
    return "" if program is None else _why(program)


@cache
def _why(program: str) -> str:
    try:
        answer = subprocess.run([program, *ASKED], capture_output=True, text=True, timeout=ASKED_S_MAX, check=True)
        rows = [line.split(",", 1) for line in answer.stdout.splitlines()]
        newest, name = max((tuple(map(int, number.split("."))), name.strip()) for number, name in rows)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ""
    if newest >= CAPABILITY_MIN:
        return ""
    has, needed = (".".join(map(str, one)) for one in (newest, CAPABILITY_MIN))
    return f"{name} has compute capability {has}, and torch needs {needed} or higher"
