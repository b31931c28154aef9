"""Whole runs with real processes. Everything is small: a few steps, a few groups, seconds of training."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_node.cli.supervisor import last_lines

SMALL_RUN = [
    "run.max_steps=8",
    "run.groups_per_step=6",
    "run.rollouts_per_group=4",
    "run.heartbeat_seconds=1",
    "run.lease_seconds=30",
    "trainer.sft.steps_max=10",
    "trainer.evaluate_every=4",
    "trainer.evaluation_problems=16",
    "up.port=0",
    "up.replay_steps=0",
]


def read(url: str) -> bytes:
    """Return the answer of an address. Raises OSError, after closing a refused connection: a later test would report its open
    socket."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            body: bytes = answer.read()
            return body
    except urllib.error.HTTPError as error:
        error.close()
        raise


def until_found(found: Callable[[], int | None], *, what: str, timeout_s: float = 120.0) -> int:
    """Poll until something is found. Retry an address that does not answer yet."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            value = found()
            if value is not None:
                return value
        time.sleep(0.1)
    pytest.fail(f"never saw: {what}")


class Up:
    """One `prime-node up` in a directory, and its state for tests."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.process: subprocess.Popen[bytes] | None = None
        self._output = directory.with_name("up.log")

    @property
    def output(self) -> str:
        return last_lines(self._output, 200)

    def start(self, *assignments: str, arguments: tuple[str, ...] = (), new: bool = True) -> None:
        command = [sys.executable, "-m", "prime_node", "up", str(self.directory), *arguments]
        for assignment in [*(SMALL_RUN if new else ()), *assignments]:
            command += ["--set", assignment]
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)

    def finish(self, *, timeout_s: float) -> int:
        """Wait for the end; returns the exit code."""
        assert self.process is not None
        try:
            return self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"`up` did not end within {timeout_s:.0f} s\n{self.everything()}")

    def interrupt(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill it as the kernel would, without notice."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def status(self) -> dict[str, Any]:
        link = (self.directory / "join-link").read_text().strip()
        status: dict[str, Any] = json.loads(read(link.partition("#")[0] + "v1/status"))
        return status

    def until(self, holds: Callable[[dict[str, Any]], bool], *, timeout_s: float, what: str) -> dict[str, Any]:
        """Poll the coordinator's status until something holds."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                status = self.status()
                if holds(status):
                    return status
            time.sleep(0.1)
        self.kill()
        pytest.fail(f"never saw: {what}\n{self.everything()}")

    def processes(self) -> list[int]:
        """Process ids of everything that works in this directory."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    line = (entry / "cmdline").read_bytes().decode(errors="replace")
                    if str(self.directory) in line:
                        found.append(int(entry.name))
        return found

    def process_of(self, role: str) -> int:
        """Process id of one role, by its command line."""
        for pid in self.processes():
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            if role in arguments[:5]:
                return pid
        raise LookupError(role)

    @contextlib.contextmanager
    def suspended(self, *roles: str) -> Iterator[None]:
        """Suspend the processes of these roles meanwhile, as a long computation would."""
        stopped = [self.process_of(role) for role in roles]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def ranks_of_trainer(self) -> list[int]:
        """Process ids of what torchrun started."""
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in self.processes()}
        return sorted(pid for pid, words in commands.items() if words[1:5] == ["-u", "-m", "prime_node", "trainer"])

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return summary

    def everything(self) -> str:
        """Output and the ends of all logs, for a failure's message."""
        logs = sorted((self.directory / "logs").glob("*.log"))
        return "\n".join([self.output, *(f"--- {path.name}\n{last_lines(path, 30)}" for path in logs)])


@contextlib.contextmanager
def joined(up: Up, folder: Path, name: str, engine: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `prime-node join` with the link of a run; its folder is NAME, its log NAME.log."""
    link = (up.directory / "join-link").read_text().strip()
    command = ["join", link, "--name", name, "--engine", engine, "--folder", str(folder / name)]
    with (folder / f"{name}.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "prime_node", *command], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def up_in(folder: Path) -> Iterator[Up]:
    """Yield a run in a folder, and leave no process of it."""
    session = Up(folder / "run")
    try:
        yield session
    finally:
        session.kill()
        for pid in session.processes():  # workers would still try to upload their bundles
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    with up_in(tmp_path) as session:
        yield session
