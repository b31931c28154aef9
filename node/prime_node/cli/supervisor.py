"""The processes of `prime-node up`: started in order, watched, restarted when they die, stopped in order.

Each child runs in its own session, so Ctrl-C in the terminal reaches only the supervisor, which then stops the children. Each
child's standard input is a pipe from the supervisor. When the pipe closes, the child stops by itself, so a killed supervisor
leaves no orphans.
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
"""Unexpected exits of one child within RESTART_WINDOW_S before the supervisor gives up on it."""
RESTART_WINDOW_S = 300.0


class ChildState(StrEnum):
    """State of a child process."""

    RUNNING = "running"
    RESTARTING = "restarting"
    DONE = "done"
    """Ended by itself, with success or with a code that rules out a restart."""
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
    """Exit codes after which the child is not restarted."""
    process: asyncio.subprocess.Process | None = None
    state: ChildState = ChildState.RUNNING
    exit_code: int | None = None
    ends: list[float] = field(default_factory=list)
    """Times of unexpected exits."""


class Supervisor:
    """Supervisor of children, by name and in start order."""

    def __init__(self, *, log_bytes_max: int = 16 * 2**20) -> None:
        self.children: dict[str, Child] = {}
        self._log_bytes_max = log_bytes_max
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()

    async def start(self, child: Child) -> None:
        """Start a child and restart it when it dies."""
        self.children[child.name] = child
        await self._spawn(child)
        self._watchers[child.name] = asyncio.create_task(self._watch(child))

    async def wait(self, name: str) -> Child:
        """Wait until the child has ended and will not be restarted. Cancelling the wait does not affect the supervision."""
        await asyncio.shield(self._watchers[name])
        return self.children[name]

    async def stop(self, name: str, *, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Ask a child to stop by signal `number`; kill it after `grace_s`."""
        child = self.children.get(name)
        if child is None or name in self._stopping:
            return
        self._stopping.add(name)
        if child.process is not None and child.process.returncode is None:
            _signal(child.process, number)
            try:
                await asyncio.wait_for(child.process.wait(), grace_s)
            except TimeoutError:
                log.warning("%s did not stop within %.0f s and is killed", name, grace_s)
                _signal(child.process, signal.SIGKILL, group=True)
        await self._watchers[name]
        if child.state not in (ChildState.DONE, ChildState.FAILED):
            child.state = ChildState.STOPPED

    def rotate_logs(self) -> None:
        """Copy logs that are too long to NAME.1 and empty them.

        Blocking; a line written in between is lost. A child keeps writing through its inherited descriptor, so the file is
        emptied, not renamed. It is open for appending, so the next line goes to the new end.
        """
        for path in {child.log_file for child in self.children.values()}:
            try:
                if path.stat().st_size >= self._log_bytes_max:
                    shutil.copyfile(path, path.with_name(path.name + ".1"))
                    os.truncate(path, 0)
            except OSError as error:  # the children report a full disk themselves
                log.debug("log %s: %s", path, error)

    async def _spawn(self, child: Child) -> None:
        child.log_file.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_regular(child.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as output:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # no file in the current folder may shadow a module
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
            _signal(child.process, signal.SIGKILL, group=True)  # including processes that it started
            if child.name in self._stopping:
                return
            if child.exit_code in child.final_codes:
                child.state = ChildState.DONE
                return
            now = time.monotonic()
            child.ends = [end for end in child.ends if now - end < RESTART_WINDOW_S] + [now]
            if len(child.ends) > RESTARTS_MAX:
                log.error(
                    "%s ended %d times within %.0f s and is not restarted again",
                    child.name,
                    len(child.ends),
                    RESTART_WINDOW_S,
                )
                child.state = ChildState.FAILED
                return
            log.warning("%s ended with code %s and is restarted", child.name, child.exit_code)
            child.state = ChildState.RESTARTING
            await asyncio.sleep(min(0.5 * 2 ** len(child.ends), 10.0))
            if child.name in self._stopping:
                return
            try:
                await self._spawn(child)
            except OSError as error:  # no memory, no free process, no room for the log
                log.error("%s cannot be restarted: %s", child.name, error)
                child.state = ChildState.FAILED
                return


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Return the environment of a child: the inherited variables and `extra`."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **extra}


def last_lines(path: Path, count: int) -> str:
    """Return the last lines of a log, for an error message."""
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])
    return ""


def _signal(process: asyncio.subprocess.Process, number: int, *, group: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
