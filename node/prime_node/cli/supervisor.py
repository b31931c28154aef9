"""The processes of `prime-node up`: started in order, watched, started again when they die, stopped in order.

Each child runs in a session of its own, so a Ctrl-C in the terminal reaches only the supervisor, which then stops them in the
order that loses nothing: workers, validators, trainer, coordinator. Each child's standard input is a pipe from the supervisor;
when it closes, the child stops by itself, so that a killed supervisor leaves no orphans.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from prime_node.inside import open_regular

log = logging.getLogger(__name__)

RESTARTS_MAX = 5
"""Unexpected ends of one child within RESTART_WINDOW_S before it is given up."""
RESTART_WINDOW_S = 300.0


class ChildState(StrEnum):
    RUNNING = "running"
    RESTARTING = "restarting"
    DONE = "done"
    """Ended by itself with success, or with a code that says not to try again."""
    FAILED = "failed"
    """Died too often."""
    STOPPED = "stopped"


@dataclass
class Child:
    """One process, through its restarts."""

    name: str
    arguments: Sequence[str]
    log_file: Path
    environment: dict[str, str] = field(default_factory=dict)
    final_codes: frozenset[int] = frozenset({0})
    """Exit codes after which it is not started again."""
    process: asyncio.subprocess.Process | None = None
    state: ChildState = ChildState.RUNNING
    exit_code: int | None = None
    ends: list[float] = field(default_factory=list)
    """When it died unexpectedly."""


class Supervisor:
    """Children by name, in the order in which they were started."""

    def __init__(self, *, log_bytes_max: int = 16 * 2**20) -> None:
        self.children: dict[str, Child] = {}
        self._log_bytes_max = log_bytes_max
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()

    async def start(self, child: Child) -> None:
        self.children[child.name] = child
        await self._spawn(child)
        self._watchers[child.name] = asyncio.create_task(self._watch(child))

    async def wait(self, name: str) -> Child:
        """Until the child has ended for good. Who gives up waiting does not disturb the watch."""
        await asyncio.shield(self._watchers[name])
        return self.children[name]

    async def stop(self, name: str, *, grace_s: float) -> None:
        """Ask it to end; kill it after `grace_s`."""
        child = self.children.get(name)
        if child is None or name in self._stopping:
            return
        self._stopping.add(name)
        if child.process is not None and child.process.returncode is None:
            _signal(child.process, signal.SIGTERM)
            try:
                await asyncio.wait_for(child.process.wait(), grace_s)
            except TimeoutError:
                log.warning("%s did not stop within %.0f s and is killed", name, grace_s)
                _signal(child.process, signal.SIGKILL, group=True)
        await self._watchers[name]
        if child.state not in (ChildState.DONE, ChildState.FAILED):
            child.state = ChildState.STOPPED

    def rotate_logs(self) -> None:
        """Copy what is too long to NAME.1 and begin anew. Blocking; a line written in between is lost.

        A child writes through the descriptor that it was given, so the file is emptied, not renamed. It is open for appending:
        what comes next goes to its new end.
        """
        for path in {child.log_file for child in self.children.values()}:
            try:
                if path.stat().st_size >= self._log_bytes_max:
                    shutil.copyfile(path, path.with_name(path.name + ".1"))
                    os.truncate(path, 0)
            except OSError as error:  # a full disk is the children's to report
                log.debug("log %s: %s", path, error)

    async def _spawn(self, child: Child) -> None:
        child.log_file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(child.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # nothing that lies in the current folder is imported in place of a module
                *child.arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                env=child_environment(child.environment),
                start_new_session=True,
            )
        child.state = ChildState.RUNNING

    async def _watch(self, child: Child) -> None:
        while True:
            assert child.process is not None
            child.exit_code = await child.process.wait()
            _signal(child.process, signal.SIGKILL, group=True)  # whatever it started itself
            if child.name in self._stopping:
                return
            if child.exit_code in child.final_codes:
                child.state = ChildState.DONE
                return
            now = time.monotonic()
            child.ends = [end for end in child.ends if now - end < RESTART_WINDOW_S] + [now]
            if len(child.ends) > RESTARTS_MAX:
                log.error(
                    "%s ended %d times within %.0f s and is given up", child.name, len(child.ends), RESTART_WINDOW_S
                )
                child.state = ChildState.FAILED
                return
            log.warning("%s ended with code %s and is started again", child.name, child.exit_code)
            child.state = ChildState.RESTARTING
            await asyncio.sleep(min(0.5 * 2 ** len(child.ends), 10.0))
            if child.name in self._stopping:
                return
            try:
                await self._spawn(child)
            except OSError as error:  # no memory, no process left, no room for the log
                log.error("%s cannot be started again and is given up: %s", child.name, error)
                child.state = ChildState.FAILED
                return


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """What a child inherits, plus `extra`. Machines with few cores suffer when every process takes all of them."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **extra}


def last_lines(path: Path, count: int) -> str:
    """The end of a log, for an error message."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
    return ""


def _signal(process: asyncio.subprocess.Process, number: int, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
