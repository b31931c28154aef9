"""A run of real processes that soak.py disturbs: its roles, a proxy between them and the coordinator, and a disk of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROLE = Path(__file__).with_name("soak_role.py")
LIFETIME_S = 600.0
"""Lifetime of a timestamp."""
SETTINGS = (
    "run.name=soak",
    "run.max_steps=100000",
    "run.groups_per_step=8",
    "run.rollouts_per_group=4",
    "run.heartbeat_seconds=1",
    "run.lease_seconds=15",
    "run.checks.proofs=false",
    "run.model.hidden_size=64",
    "coordinator.snapshot_events=200",
    "coordinator.check_seconds=10",
    f"coordinator.timestamp_lifetime_seconds={LIFETIME_S}",
    "trainer.sft.steps_max=0",
    "trainer.evaluate_every=0",
    "trainer.checkpoint_every=3",
    'run.environments=[{name="words", id="jsonl", options={path="words.jsonl"}}]',
)
THREADS = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
EXPECTED_CODES = (3, 6)
"""Exit codes after which a service manager starts a role again: its machine was at fault, or a fault may pass."""
DISK_BYTES = 2**31


class ClockFile:
    """Milliseconds by which the wall clock of one role is wrong, in a file that the role maps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(8))

    def set(self, seconds: float) -> None:
        """Set the clock off by some seconds."""
        with self.path.open("r+b") as file:
            file.write(struct.pack("<q", round(1_000 * seconds)))


@dataclass
class RoleProcess:
    """One role, which may be started again and again."""

    name: str
    arguments: Sequence[str]
    log: Path
    clock: ClockFile
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0

    def start(self) -> None:
        """Start the role, unless it runs."""
        if self.is_running:
            return
        self.starts += 1
        command = [sys.executable, "-P", str(ROLE), str(self.clock.path), *self.arguments, "--stop-with-parent"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **THREADS}
            )

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process is not None and self.process.poll() is None

    def reap(self) -> int | None:
        """Return the exit code of a process that ended by itself since the last call."""
        if self.process is None or self.process.poll() is None:
            return None
        code = self.process.returncode
        self._forget()
        return code

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process alone."""
        if self.is_running and self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> bool:
        """Kill the process as the kernel would, and return whether it ran."""
        if not self.is_running or self.process is None:
            return False
        self.process.kill()
        self.process.wait()
        self._forget()
        return True

    def stop(self, grace_s: float = 20.0) -> int | None:
        """Stop the process as a service manager does, and return its exit code."""
        if self.process is None:
            return None
        self.send(signal.SIGTERM)
        try:
            code = self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._forget()
        return code

    def _forget(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None


class Proxy:
    """Forwarder of TCP connections to the coordinator: it can cut them, refuse them, and hold them without an end."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.refuses = False
        self.flows = asyncio.Event()
        """Unset: bytes stay here, and both sides wait."""
        self.flows.set()

    async def open(self, port: int) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)

    def cut(self) -> None:
        """Reset all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        self.flows.set()
        if self._server is not None:
            self._server.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self.refuses:
                return
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._to)
            self._writers.add(inner_writer)
            pumps = [
                asyncio.ensure_future(self._pump(reader, inner_writer)),
                asyncio.ensure_future(self._pump(inner_reader, writer)),
            ]
            self._tasks.update(pumps)
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            self._tasks.difference_update(pumps)
            self._writers.discard(inner_writer)
            inner_writer.transport.abort()
        except OSError:
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(2**16):
                await self.flows.wait()
                writer.write(data)
                await writer.drain()


class SoakRun:
    """All roles of one run in one folder, with logs outside of it: they stay readable when the run's disk is full."""

    def __init__(self, folder: Path, logs: Path, *, workers: int, seeder: bool) -> None:
        self.folder, self.logs = folder, logs
        self.port, self.link_port = free_port(), free_port()
        self.proxy = Proxy(self.port)
        self.link = ""
        self.roles: dict[str, RoleProcess] = {}
        self._workers, self._seeder = workers, seeder

    def make(self, config: Path) -> None:
        """Make the run: keys, model files, RunSpec, join link."""
        command = [sys.executable, "-P", "-m", "prime_node", "new", str(self.folder), "--config", str(config)]
        command += ["--url", f"http://127.0.0.1:{self.link_port}"]
        data = self.folder.parent / "data"
        data.mkdir()
        words = ["".join(letters) for letters in itertools.product("abcde", repeat=4)]
        rows = (json.dumps({"question": word, "answer": word[::-1]}) for word in words)
        (data / "words.jsonl").write_text("".join(f"{row}\n" for row in rows))
        for setting in (*SETTINGS, f"environments.data_folder={data}"):
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.link = (self.folder / "join-link").read_text().strip()
        run, swarm = str(self.folder), ("swarm.host=127.0.0.1", "swarm.p2p=off")
        self._add("coordinator", "coordinator", run, "--set", f"coordinator.port={self.port}")
        self._add("trainer", "trainer", run, *_set("trainer", swarm))
        self._add("validator", "validator", run, *_set("validator", swarm))
        for number in range(1, self._workers + 1):
            name = f"worker-{number}"
            where = ("--folder", str(self.folder / name), "--name", name, "--engine", "transformers")
            self._add(name, "join", self.link, *where, *_set("worker", swarm))
        if self._seeder:
            self._add("seeder", "seed", self.link, "--folder", str(self.folder / "seeder"), *_set("worker", swarm))

    def _add(self, name: str, *arguments: str) -> None:
        clock = ClockFile(self.logs / f"{name}.clock")
        self.roles[name] = RoleProcess(name, arguments, self.logs / f"{name}.log", clock)

    def workers(self) -> list[str]:
        """Return the names of the workers."""
        return [name for name in self.roles if name.startswith("worker")]

    def close(self) -> None:
        """Kill everything."""
        for role in self.roles.values():
            role.kill()


def _set(section: str, settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", f"{section}.{setting}")]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


@contextlib.contextmanager
def small_disk() -> Iterator[tuple[Path, bool]]:
    """Yield a folder, and whether it is a disk of its own that can be filled: root may mount one in memory."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        mounted = os.geteuid() == 0 and _succeeds(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "soak", name])
        try:
            yield Path(name), mounted
        finally:
            for _ in range(20 if mounted else 0):  # processes that were just killed may hold it
                if _succeeds(["umount", name]):
                    break
                time.sleep(0.1)


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, check=False, capture_output=True).returncode == 0
    except OSError:
        return False
