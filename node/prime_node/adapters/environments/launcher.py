"""Starts processes of environments for a role that has confined itself, and so could give them no namespaces any more.

A role starts it before that. An order says no more than whether a process is to have the network, and brings its three pipes;
command lines and environment variables were told once, before the role heard a stranger. So a role that is taken over gets from
here the view of files and the network that the machine's own settings allow. Limits and the user travel in the role's first line
to the process: a role that is taken over can leave them out. The launcher ends with its role, and ends what it has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from prime_protocol.errors import LocalError

PLAN_BYTES_MAX = 2**17
ORDER_BYTES_MAX = 2**10
RUNNING_MAX = 64
"""Processes at a time."""
STDIN = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How a process is started."""

    line: list[str]
    variables: dict[str, str]
    user: int | None
    """Which user it becomes."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A process that the launcher has started; what child.py needs of a subprocess.Popen."""

    launcher: Launcher
    pid: int
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    def kill(self) -> None:
        """Blocks until it has ended."""
        self.launcher.kill(self.pid)

    def wait(self) -> None:
        """It has ended once it is killed."""


class Launcher:
    """The role's side. To be made before the role confines itself."""

    def __init__(self, plans: Mapping[bool, Plan]) -> None:
        """`plans`: of processes with the network and without."""
        self.plans = plans
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                # -P and -s: nothing that lies in the current folder or in HOME is imported in place of a module.
                [sys.executable, "-P", "-s", "-m", "prime_node.adapters.environments.launcher"],
                stdin=theirs.fileno(),
                env=plans[False].variables,
                start_new_session=True,
            )
        told = {str(network): [plan.line, plan.variables, plan.user] for network, plan in plans.items()}
        self._channel.send(json.dumps(told).encode())

    def start(self, *, network: bool) -> Launched:
        """Raises LocalError."""
        pipes = [os.pipe() for _ in range(3)]
        inner = [pipes[0][0], pipes[1][1], pipes[2][1]]
        outer = [pipes[0][1], pipes[1][0], pipes[2][0]]
        try:
            told = self._order({"network": network}, inner)
        finally:
            for descriptor in inner:
                os.close(descriptor)
        if "pid" not in told:
            for descriptor in outer:
                os.close(descriptor)
            raise LocalError(f"the environments' process does not start: {told.get('error', 'its launcher is gone')}")
        stdin, stdout, stderr = (os.fdopen(one, mode) for one, mode in zip(outer, ("wb", "rb", "rb"), strict=True))
        return Launched(self, told["pid"], stdin, stdout, stderr)

    def kill(self, pid: int) -> None:
        """What is gone already is left alone."""
        self._order({"kill": pid}, [])

    def close(self) -> None:
        """Idempotent. Ends all that it has started."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()
        self._process.wait()

    def _order(self, order: dict[str, object], descriptors: list[int]) -> dict[str, int]:
        """Its answer; an empty one where it is gone."""
        with self._lock:
            try:
                socket.send_fds(self._channel, [json.dumps(order).encode()], descriptors)
                return dict(json.loads(self._channel.recv(ORDER_BYTES_MAX) or b"{}"))
            except OSError:
                return {}


def serve(channel: socket.socket) -> None:
    """Until the role is gone."""
    plans = {name: Plan(*plan) for name, plan in json.loads(channel.recv(PLAN_BYTES_MAX)).items()}
    running: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(channel, ORDER_BYTES_MAX, 3)
            if not data:
                return
            running = {pid: process for pid, process in running.items() if process.poll() is None}
            try:
                answer = _obey(json.loads(data), descriptors, plans, running)
            except (OSError, ValueError, KeyError, TypeError) as error:
                answer = {"error": str(error)[:200]}
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            channel.send(json.dumps(answer).encode())
    finally:
        for process in running.values():
            process.kill()
            process.wait()


def _obey(
    order: dict[str, object],
    descriptors: list[int],
    plans: Mapping[str, Plan],
    running: dict[int, subprocess.Popen[bytes]],
) -> dict[str, object]:
    if "kill" in order:
        process = running.pop(int(str(order["kill"])), None)
        if process is not None:
            process.kill()
            process.wait()
        return {}
    if len(running) >= RUNNING_MAX or len(descriptors) != 3:
        raise ValueError(f"at most {RUNNING_MAX} processes, each with three pipes")
    plan = plans[str(order["network"] is True)]
    stdin, stdout, stderr = descriptors
    process = subprocess.Popen(
        plan.line, stdin=stdin, stdout=stdout, stderr=stderr, env=plan.variables, cwd="/", start_new_session=True
    )
    running[process.pid] = process
    return {"pid": process.pid}


def main() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its role ends it
    with socket.socket(fileno=STDIN) as channel, contextlib.suppress(OSError):
        serve(channel)


if __name__ == "__main__":
    main()
