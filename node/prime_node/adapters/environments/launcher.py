"""Starts environment processes for a role that has confined itself and can no longer create namespaces.

A role starts the launcher before that, and sends it once the most that a process may have: a Plan with the network and one
without. An order asks for less: whether the process gets the network and a loopback interface, and which files of the plan's
choices it reads. The launcher checks the order, builds the file system view, and writes the restrictions into the command line.
A compromised role therefore gets no process with more access, higher limits or another user than the machine's own settings
allow. The launcher ends with its role, and ends all processes that it has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from prime_node.adapters.environments.restrictions import TMP, ProcessRestrictions, around_command, why_not_isolated
from prime_node.adapters.environments.variables import (
    for_launcher,
    forget,
    keys_of_judges,
    module_folders,
    passed_on,
)
from prime_node.adapters.sandbox.bubblewrap import kill_wrapped
from prime_protocol.errors import LocalError

PLAN_BYTES_MAX = 2**17
ORDER_BYTES_MAX = 2**16
RUNNING_MAX = 64
"""Maximum number of processes at a time."""
STDIN = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Upper bound on a process's access."""

    restrictions: ProcessRestrictions
    """Limits, and the paths that every process reads."""
    choices: tuple[str, ...] = ()
    """Real paths of folders. An order may name files in them, which the process then reads too."""

    def narrowed(self, read: Sequence[str], *, loopback: bool) -> ProcessRestrictions:
        """Return the plan's restrictions with access to those files. Raises ValueError and OSError for another path."""
        named = tuple(path for path in read if not self._is_read_anyway(path))
        for path in named:
            self._check(Path(path))
        return replace(
            self.restrictions, read=(*self.restrictions.read, *named), loopback=self.restrictions.loopback and loopback
        )

    def _is_read_anyway(self, path: str) -> bool:
        real = Path(path).resolve()
        return any(_is_open(real, Path(root).resolve(), self.restrictions.hidden) for root in self.restrictions.read)

    def _check(self, path: Path) -> None:
        """Check a path. It must itself be in a choice, so that a role cannot replace a symbolic link on the way."""
        real = path.resolve(strict=True)
        if (
            ".." in path.parts
            or not stat.S_ISREG(real.stat().st_mode)
            or not any(
                path.is_relative_to(one) and _is_open(real, Path(one), self.restrictions.hidden) for one in self.choices
            )
        ):
            raise ValueError(f"{path} is not a file that environments may read")


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that the launcher has started, with the part of subprocess.Popen that child.py needs."""

    launcher: Launcher
    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def kill(self) -> None:
        """Kill the process and block until it has ended."""
        self.launcher.kill(self.pid)

    def wait(self) -> None:
        """Do nothing: a killed process has ended."""


class Launcher:
    """The role's side. Create it before the role confines itself."""

    def __init__(self, plans: Mapping[bool, Plan], command: Sequence[str]) -> None:
        """Start the launcher. `plans`: by network access. `command` gets its restrictions as a further argument."""
        self._lock = threading.Lock()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                # -P and -s: no file in the current folder or in HOME may shadow a module.
                [sys.executable, "-P", "-s", "-m", "prime_node.adapters.environments.launcher"],
                stdin=theirs.fileno(),
                env=for_launcher(network=True in plans),
                start_new_session=True,
            )
        order = {"command": list(command), "plans": {str(network): asdict(plan) for network, plan in plans.items()}}
        self.channel.send(json.dumps(order).encode())

    def start(self, *, network: bool, loopback: bool = False, read: Sequence[str] = ()) -> Launched:
        """Start a process that reads those files besides the common ones. Raises LocalError."""
        pipes = [os.pipe() for _ in range(3)]
        inner = [pipes[0][0], pipes[1][1], pipes[2][1]]
        outer = [pipes[0][1], pipes[1][0], pipes[2][0]]
        try:
            order = self._order({"network": network, "loopback": loopback, "read": list(read)}, inner)
        finally:
            for descriptor in inner:
                os.close(descriptor)
        if "pid" not in order:
            for descriptor in outer:
                os.close(descriptor)
            raise LocalError(f"the environment process does not start: {order.get('error', 'its launcher has exited')}")
        stdin, stdout, stderr = (os.fdopen(one, mode) for one, mode in zip(outer, ("wb", "rb", "rb"), strict=True))
        return Launched(self, order["pid"], stdin, stdout, stderr)

    def kill(self, pid: int) -> None:
        """Kill a process, unless it has ended."""
        self._order({"kill": pid}, [])

    def close(self) -> None:
        """Close the launcher and end all its processes. Idempotent."""
        with contextlib.suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        self.channel.close()
        self._process.wait()

    def _order(self, order: dict[str, object], descriptors: list[int]) -> dict[str, int]:
        """Send an order and return the answer; empty if the launcher has exited."""
        with self._lock:
            try:
                socket.send_fds(self.channel, [json.dumps(order).encode()], descriptors)
                return dict(json.loads(self.channel.recv(ORDER_BYTES_MAX) or b"{}"))
            except OSError:
                return {}


class Server:
    """The launcher's own side."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._command: list[str] = order["command"]
        self._plans = {
            name: Plan(ProcessRestrictions.of(plan["restrictions"]), tuple(plan["choices"]))
            for name, plan in order["plans"].items()
        }
        self._imports = module_folders()
        self._variables = {name: passed_on(TMP, network=name == str(True)) for name in self._plans}
        forget(keys_of_judges())
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def serve(self, channel: socket.socket) -> None:
        """Serve until the role exits."""
        try:
            while True:
                data, descriptors, _, _ = socket.recv_fds(channel, ORDER_BYTES_MAX, 3)
                if not data:
                    return
                self._running = {pid: process for pid, process in self._running.items() if process.poll() is None}
                try:
                    answer = self._obey(json.loads(data), descriptors)
                except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                    answer = {"error": str(error)[:200]}
                finally:
                    for descriptor in descriptors:
                        os.close(descriptor)
                channel.send(json.dumps(answer).encode())
        finally:
            for process in self._running.values():
                kill_wrapped(process)

    def _obey(self, order: dict[str, Any], descriptors: list[int]) -> dict[str, object]:
        if "kill" in order:
            process = self._running.pop(int(str(order["kill"])), None)
            if process is not None:
                kill_wrapped(process)
            return {}
        if len(self._running) >= RUNNING_MAX or len(descriptors) != 3:
            raise ValueError(f"at most {RUNNING_MAX} processes, each with three pipes")
        if why := why_not_isolated():
            raise ValueError(why)
        name = str(order["network"] is True)
        read = [str(path) for path in order["read"]]
        restrictions = self._plans[name].narrowed(read, loopback=order["loopback"] is True)
        line, _, _ = around_command(self._command, TMP, restrictions, imports=self._imports)
        stdin, stdout, stderr = descriptors
        process = subprocess.Popen(
            line,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=self._variables[name],
            cwd="/",
            start_new_session=True,
        )
        self._running[process.pid] = process
        return {"pid": process.pid}


def _is_open(path: Path, root: Path, hidden: Sequence[str]) -> bool:
    """Whether the real path is in the root and no hidden path is between them."""
    closed = any(path.is_relative_to(one) and not root.is_relative_to(one) for one in hidden)
    return path.is_relative_to(root) and not closed


def run_launcher() -> None:
    """Receive the plans on standard input, then serve orders."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its role ends it
    with socket.socket(fileno=STDIN) as channel, contextlib.suppress(OSError):
        if order := channel.recv(PLAN_BYTES_MAX):
            Server(json.loads(order)).serve(channel)


if __name__ == "__main__":
    run_launcher()
