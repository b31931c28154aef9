"""One timed broadcast between shaped hosts: when each one held the whole verified file, compared with the physical bound."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from prime_lab.homes import can_connect

from .excess import excess
from .network import BYTES_PER_MBIT, Host, Link, Network, Process

NODES = Path(__file__).parent / "nodes"
ROOT = Path(__file__).parents[3]
PRODUCT = {"PYTHONPATH": os.pathsep.join([str(ROOT / "node"), str(ROOT / "protocol"), str(ROOT)])}
"""The environment of processes that import the product from this checkout."""
PORT = 9_000
POLL_S = 0.004
LOOK_S = 0.1
"""Seconds between readings of the links' traffic."""
START_S = 4.0
"""Seconds that each further process may add to the start of all, on two slow cores."""
QUIET_SHARE, QUIET_LOOK_S, QUIET_S_MAX = 0.25, 0.5, 15.0
"""Share of the processors below which a race begins, seconds over which it is measured, and the longest wait for it. What a
program does once, at its start, is no part of a broadcast to programs that run."""


@dataclass(frozen=True, slots=True)
class System:
    """A program that can be origin and receiver. `python` has the packages that it imports."""

    name: str
    python: Path
    script: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    writes_later: bool = False
    """`out.bin` is written once the race is over, with a marker `written` of its own."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults at seconds after the start, by receiver (1 to N)."""

    killed: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[int, float] = field(default_factory=dict)
    poisoned: frozenset[int] = frozenset()
    """These answer every request with a flipped byte."""
    origin_dies_at_copies: float | None = None
    """The origin is killed once it has sent this many files' worth of bytes."""
    partition: tuple[frozenset[int], float, float] | None = None
    """These are cut off from all others, from when until when."""


@dataclass(frozen=True, slots=True)
class Row:
    """One broadcast to run. `links[0]` is the origin's."""

    name: str
    size_mb: float
    links: tuple[Link, ...]
    faults: Faults = Faults()
    timeout_s: float = 180.0
    excused: frozenset[int] = frozenset()
    """Receivers whose time does not count, though they must finish too unless they are killed."""

    @property
    def num_receivers(self) -> int:
        return len(self.links) - 1

    @property
    def bound_s(self) -> float:
        """Return the fluid lower bound of Kumar & Ross (2006) for the receivers that count."""
        size = self.size_mb * 1e6
        origin, receivers = self.links[0], self.links[1:]
        counted = [link for index, link in enumerate(receivers, 1) if index not in self.excused]
        uplinks = origin.up_mbit + sum(link.up_mbit for link in receivers)
        slowest = min(link.down_mbit for link in counted)
        rates = (origin.up_mbit, slowest, uplinks / len(counted))
        return max(size / (rate * BYTES_PER_MBIT) for rate in rates)


@dataclass(slots=True)
class Outcome:
    """Observations. Times are in seconds after the start, or after its own start for a late joiner."""

    system: str
    row: Row
    done_s: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    origin_copies: float = 0.0
    """Bytes that the origin sent over its link, in files."""
    received_copies: float = 0.0
    """Bytes that a receiver got over its link, in files, the mean."""
    cpu_origin_s: float = 0.0
    """Processor time from the start until the last one was done, without the start of the process."""
    cpu_receiver_s: float = 0.0
    """The same of a receiver: the mean of those that were present from the start to the end."""
    rss_receiver_mb: float = 0.0
    """Largest resident memory of a receiver until the last one was done, before the product copies the file for comparison."""
    resent_share: float = 0.0
    """TCP segments that were sent again, of all that all hosts sent."""
    busy_share: float = 0.0
    """Share of this machine's processor time that anything used, from the start until the last one was done."""
    linked_share: float | None = None
    """Of the links that receivers could make, those that were made before the start; None for programs that do not say."""
    excess: dict[str, float] = field(default_factory=dict)
    """excess.py: parts of the ratio beyond one."""

    @property
    def last_s(self) -> float:
        counted = [seconds for index, seconds in self.done_s.items() if index not in self.row.excused]
        return max(counted) if counted and not self.failed else float("inf")

    @property
    def ratio(self) -> float:
        return self.last_s / self.row.bound_s

    def as_json(self) -> dict[str, Any]:
        return {
            "row": self.row.name,
            "system": self.system,
            "bound_s": round(self.row.bound_s, 2),
            "last_s": round(self.last_s, 2) if self.done_s and not self.failed else None,
            "ratio": round(self.ratio, 3) if not self.failed else None,
            "done_s": {index: round(seconds, 2) for index, seconds in sorted(self.done_s.items())},
            "failed": self.failed,
            "origin_copies": round(self.origin_copies, 2),
            "received_copies": round(self.received_copies, 3),
            "cpu_origin_s": round(self.cpu_origin_s, 2),
            "cpu_receiver_s": round(self.cpu_receiver_s, 2),
            "rss_receiver_mb": round(self.rss_receiver_mb),
            "resent_share": round(self.resent_share, 4),
            "busy_share": round(self.busy_share, 3),
            "linked_share": self.linked_share,
            "excess": self.excess,
        }


def make_payload(folder: Path, size_mb: float) -> tuple[Path, str]:
    """The parts of a policy in one file, and its SHA-256: within a percent of the size, and the same bytes each time."""
    policy = folder / f"policy-{size_mb:g}"
    path = policy / "payload.bin"
    if not (policy / "run").exists():
        command = [sys.executable, str(NODES / "make_policy.py"), str(size_mb), str(policy)]
        subprocess.run(command, check=True, env={**os.environ, **PRODUCT})
    return path, sha256_of(path)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def processor_time_s() -> tuple[float, float]:
    """Return the processor time that this machine has used since its start, and used or left idle, in seconds."""
    user, nice, system, idle, waits, *others = map(int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8])
    spent = user + nice + system + idle + waits + sum(others)
    ticks = os.sysconf("SC_CLK_TCK")
    return (spent - idle - waits) / ticks, spent / ticks


def wait_until_quiet() -> None:
    """Wait until little uses this machine's processors, QUIET_S_MAX at most: other programs may keep them busy."""
    end_s, (used_s, spent_s) = time.monotonic() + QUIET_S_MAX, processor_time_s()
    share = 1.0
    while share > QUIET_SHARE and time.monotonic() < end_s:
        time.sleep(QUIET_LOOK_S)
        (before_used_s, before_spent_s), (used_s, spent_s) = (used_s, spent_s), processor_time_s()
        share = (used_s - before_used_s) / max(spent_s - before_spent_s, 1e-3)


def run(
    system: System,
    row: Row,
    folder: Path,
    *,
    keep: bool = False,
    beside: Callable[[Network], AbstractContextManager[object]] = lambda network: contextlib.nullcontext(),
) -> Outcome:
    """Run it once. Failures are in the outcome; an exception is the harness's own.

    `beside` is open from the moment when all hosts are ready until all are done, and may delay both.
    """
    payload, digest = make_payload(folder, row.size_mb)
    work = folder / "race"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    with Network(row.links) as network:
        race = _Race(system, row, network, work, payload, digest)
        outcome = race.run(beside)
    race.check_what_they_hold()
    if not keep and not outcome.failed:
        shutil.rmtree(work)
    return outcome


class _Race:
    def __init__(self, system: System, row: Row, network: Network, work: Path, payload: Path, digest: str) -> None:
        self._system, self._row, self._network, self._work = system, row, network, work
        self._payload, self._digest = payload, digest
        self._processes: dict[int, Process] = {}
        self._outcome = Outcome(system.name, row)
        (work / "shared").mkdir()

    def run(self, beside: Callable[[Network], AbstractContextManager[object]]) -> Outcome:
        origin, *receivers = self._network.hosts
        faults = self._row.faults
        self._start(origin)
        self._wait_until_ready([origin])
        on_time = [host for host in receivers if host.index not in faults.late]
        for host in on_time:
            self._start(host)
        self._wait_until_ready(on_time, "up", "ready")
        (self._work / "everyone").touch()
        self._wait_until_ready(on_time)
        noted = [note for host in on_time if (note := self._folder(host.index) / "linked").exists()]
        if noted:
            self._outcome.linked_share = round(sum(float(note.read_text()) for note in noted) / len(noted), 3)
        wait_until_quiet()
        with beside(self._network):
            before = [self._network.bytes_sent_and_received(host) for host in self._network.hosts]
            cpu_before = {index: process.cpu_so_far_s() for index, process in self._processes.items()}
            used_s, spent_s = processor_time_s()
            (self._work / "go").touch()
            self._watch(time.monotonic(), before[0][0])
            used_now_s, spent_now_s = processor_time_s()
            cpu_s = {index: self._processes[index].cpu_so_far_s() - began_s for index, began_s in cpu_before.items()}
            after = [self._network.bytes_sent_and_received(host) for host in self._network.hosts]
            peaks_mb = [self._processes[host.index].peak_mb() for host in receivers]
        segments = [process.tcp_segments_sent_and_resent() for process in self._processes.values()]
        (self._work / "over").touch()
        self._wait_until_written()
        for process in self._processes.values():
            process.stop()
        size = self._row.size_mb * 1e6
        received = [now[1] - then[1] for now, then in zip(after[1:], before[1:], strict=True)]
        out = self._outcome
        out.origin_copies = (after[0][0] - before[0][0]) / size
        out.received_copies = sum(received) / len(received) / size
        out.resent_share = sum(resent for _, resent in segments) / max(1, sum(sent for sent, _ in segments))
        out.busy_share = (used_now_s - used_s) / max(spent_now_s - spent_s, 1e-3)
        stayed = [of_one_s for index, of_one_s in cpu_s.items() if index and of_one_s > 0]
        out.cpu_origin_s = max(0.0, cpu_s[0])
        out.cpu_receiver_s = sum(stayed) / max(1, len(stayed))
        out.rss_receiver_mb = max(peaks_mb)
        return out

    def check_what_they_hold(self) -> None:
        """A wrong byte is a failure, whatever the system said."""
        for index in list(self._outcome.done_s):
            path = self._folder(index) / "out.bin"
            if not path.exists() or sha256_of(path) != self._digest:
                self._outcome.failed[index] = "wrong bytes"

    def _folder(self, index: int) -> Path:
        return self._work / f"host{index}"

    def _start(self, host: Host) -> None:
        folder = self._folder(host.index)
        folder.mkdir(exist_ok=True)
        described = {
            "role": "receiver" if host.index else "origin",
            "index": host.index,
            "address": host.address,
            "own_address": host.own_address,
            "port": PORT,
            "file": str(self._payload),
            "size": self._payload.stat().st_size,
            "digest": self._digest,
            "out": str(folder / "out.bin"),
            "shared": str(self._work / "shared"),
            "everyone": str(self._work / "everyone"),
            "go": str(self._work / "go"),
            "over": str(self._work / "over"),
            "origin": self._network.hosts[0].address,
            "receivers": [other.address for other in self._network.hosts[1:]],
            "is_nat": host.link.is_nat,
            "has_nat": any(link.is_nat for link in self._row.links),
            "is_on_time": host.index not in self._row.faults.late,
            "num_links": self._num_links(host),
            "poisoned": host.index in self._row.faults.poisoned,
            "options": dict(self._system.options),
        }
        (folder / "node.json").write_text(json.dumps(described))
        command = [str(self._system.python), str(self._system.script), "node.json"]
        self._processes[host.index] = self._network.start(host, command, folder, self._system.environment)

    def _num_links(self, host: Host) -> int:
        """Return the number of peers, the origin included, that a host can link to: not two behind NAT that nothing punches."""
        others = [one for one in self._network.hosts if one is not host and one.index not in self._row.faults.late]
        return sum(can_connect(host.link.nat, other.link.nat) for other in others)

    def _wait_until_ready(self, hosts: Sequence[Host], *markers: str) -> None:
        end_s = time.monotonic() + 120 + START_S * len(hosts)
        for host in hosts:
            while not any((self._folder(host.index) / marker).exists() for marker in markers or ("ready",)):
                if self._processes[host.index].poll() is not None or time.monotonic() > end_s:
                    log = (self._folder(host.index) / "log").read_text()[-2_000:]
                    raise RuntimeError(f"{self._system.name}, host {host.index} does not become ready:\n{log}")
                time.sleep(0.01)

    def _wait_until_written(self) -> None:
        """The product writes its file for the comparison when all are done: the copy must not take others' processor time."""
        end_s = time.monotonic() + 30
        for index in self._outcome.done_s if self._system.writes_later else ():
            while not (self._folder(index) / "written").exists() and time.monotonic() < end_s:
                time.sleep(0.01)

    def _watch(self, began_s: float, sent_before: int) -> None:
        """Wait until all hosts that are still expected are done or have failed, while the faults happen."""
        faults, out = self._row.faults, self._outcome
        hosts = self._network.hosts
        events: list[tuple[float, int, Callable[[], None]]] = []
        for index, at_s in faults.killed.items():
            events.append((at_s, index, self._processes[index].kill))
        for index, at_s in faults.late.items():
            events.append((at_s, index, partial(self._start, hosts[index])))
        if faults.partition:
            apart, from_s, until_s = faults.partition
            events.append((from_s, 0, partial(self._network.cut_off, [hosts[index] for index in apart])))
            events.append((until_s, 0, self._network.heal))
        events.sort(key=lambda event: event[:2], reverse=True)
        samples: list[tuple[float, int]] = []
        carried = self._network.bytes_received_by_all()
        dies_at_bytes = (faults.origin_dies_at_copies or 0) * self._row.size_mb * 1e6
        expected = {host.index for host in hosts[1:]} - faults.killed.keys()
        next_count_s = 0.0
        while not out.done_s.keys() | out.failed.keys() >= expected:
            now_s = time.monotonic() - began_s
            if carried is not None and (not samples or now_s - samples[-1][0] >= LOOK_S):
                samples.append((now_s, (self._network.bytes_received_by_all() or 0) - carried))
            while events and events[-1][0] <= now_s:
                events.pop()[2]()
            if dies_at_bytes and next_count_s <= now_s:
                next_count_s = now_s + 0.05
                if self._network.bytes_sent_and_received(hosts[0])[0] - sent_before >= dies_at_bytes:
                    self._processes[0].kill()
                    dies_at_bytes = 0
            for index in (expected & self._processes.keys()) - out.done_s.keys() - out.failed.keys():
                if (self._folder(index) / "done").exists():
                    out.done_s[index] = now_s - faults.late.get(index, 0.0)
                elif self._processes[index].poll() is not None:
                    out.failed[index] = f"ended with {self._processes[index].exit_code}"
            if now_s > self._row.timeout_s:
                out.failed |= dict.fromkeys(expected - out.done_s.keys() - out.failed.keys(), "timeout")
            time.sleep(POLL_S)
        if carried is not None and not out.failed:
            samples.append((out.last_s, (self._network.bytes_received_by_all() or 0) - carried))
            out.excess = excess(samples, len(expected) * self._row.size_mb * 1e6, self._row.bound_s)
