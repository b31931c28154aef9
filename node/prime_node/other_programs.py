"""What other programs do on this machine: their use of the processor and of the GPU.

`/proc` shows the processor's time, of all programs and of each process. What is left after this process and its
descendants is the others'. A program that only waits for a person's next key uses no processor; at_desk.py sees that.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from prime_node.at_desk import Desk
from prime_node.ports.clock import Clock
from prime_node.power import PowerSupply

log = logging.getLogger(__name__)

PROC = Path("/proc")
LOOK_S = 5.0
"""Seconds between two looks. Each is the mean since the look before."""
BUSY_SHARE = 0.25
"""Share of all processors above which other programs count as busy."""
QUIET_S = 60.0
"""Seconds without use after which they count as idle again."""
GPU_COMMAND = ("nvidia-smi", "pmon", "-c", "1", "-s", "u")
GPU_LOOK_S, GPU_ANSWER_S_MAX = 10.0, 20.0
GPU_BUSY_PERCENT = 10
"""Use of a GPU's cores by a program that only draws, a game's or a video's, above which it counts. A desktop draws too."""


class OtherPrograms:
    """Use of the processor by programs other than a process and its descendants."""

    def __init__(self, proc: Path = PROC, own_pid: int | None = None) -> None:
        self._proc = proc
        self._own_pid = own_pid or os.getpid()
        self._seen: tuple[int, int, int] | None = None

    def processor_share(self) -> float | None:
        """Return the share of all processors that they have used since the last call; None at the first, and without /proc."""
        now, before = self._look(), self._seen
        self._seen = now
        if now is None or before is None or now[0] <= before[0]:
            return None
        total, busy, own = (new - old for new, old in zip(now, before, strict=True))
        return max(0.0, busy - max(0, own)) / total

    def _look(self) -> tuple[int, int, int] | None:
        """Return all, busy and own ticks so far."""
        try:
            ticks = [int(one) for one in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        total = sum(ticks)
        return total, total - ticks[3] - ticks[4], self._own_ticks()

    def _own_ticks(self) -> int:
        """Return the ticks of the own process, its descendants, and those that have ended."""
        found = dict(_processes(self._proc))
        own = _descendants({pid: parent for pid, (parent, _) in found.items()}, self._own_pid)
        return sum(found[pid][1] for pid in own if pid in found)


class ThisMachine:
    """What else happens on this machine (worker.control.Surroundings).

    The processor is looked at only when asked, at most every LOOK_S seconds; the GPU by a thread, since its driver may take long.
    """

    def __init__(
        self,
        power: PowerSupply,
        clock: Clock,
        *,
        desk: Desk | None = None,
        others: OtherPrograms | None = None,
        gpu_table: Callable[[], str | None] | None = None,
    ) -> None:
        self._power, self._clock, self._desk = power, clock, desk
        self._asked_s = -math.inf
        self._others = others or OtherPrograms()
        self._gpu_table = gpu_table or nvidia_table
        self._looked_s, self._busy_s = -math.inf, -math.inf
        self._gpu_looked_s, self._gpu_busy_s = -math.inf, -math.inf
        self._asking: threading.Thread | None = None

    def on_battery(self) -> bool:
        """Return whether the machine runs on battery power."""
        return self._power.on_battery()

    def is_busy(self) -> bool:
        """Return whether other programs have used the processor within the last minute."""
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= LOOK_S:
            share, self._looked_s = self._others.processor_share(), now_s
            if share is not None and share > BUSY_SHARE:
                self._busy_s = now_s
        return now_s - self._busy_s < QUIET_S

    def is_gpu_busy(self) -> bool:
        """Return whether other programs have used the GPU within the last minute."""
        now_s = self._clock.monotonic_s()
        is_asking = self._asking is not None and self._asking.is_alive()
        if now_s - self._gpu_looked_s >= GPU_LOOK_S and not is_asking:
            self._gpu_looked_s = now_s
            self._asking = threading.Thread(target=self._look_at_gpu, args=(now_s,), daemon=True)
            self._asking.start()
        return now_s - self._gpu_busy_s < QUIET_S

    def is_in_use(self) -> bool:
        """Return whether a person uses the machine's keyboard and mouse, as logind said at the last look."""
        if self._desk is None:
            return False
        now_s = self._clock.monotonic_s()
        if now_s - self._asked_s >= LOOK_S:
            self._asked_s = now_s
            self._desk.ask()
        return self._desk.is_in_use()

    def close(self) -> None:
        """Close the files of the power supply, and end the child that asks logind. Idempotent."""
        self._power.close()
        if self._desk is not None:
            self._desk.close()

    def _look_at_gpu(self, now_s: float) -> None:
        table = self._gpu_table()
        if table is not None and gpu_users(table) - own_processes():
            self._gpu_busy_s = now_s


def gpu_users(table: str) -> set[int]:
    """Return the processes that compute on a GPU, or draw much, by the table of `nvidia-smi pmon -s u`.

    Unknown columns are ignored, and so are rows that are not as its first line describes.
    """
    lines = [line.split() for line in table.splitlines()]
    names = next((line[1:] for line in lines if line[:1] == ["#"]), [])
    found = set()
    for line in lines:
        row = dict(zip(names, line, strict=False))
        if not row.get("gpu", "").isdigit() or not row.get("pid", "").isdigit():
            continue
        use = row.get("sm", "")
        is_drawing = use.isdigit() and int(use) >= GPU_BUSY_PERCENT
        if "C" in row.get("type", "") or is_drawing:
            found.add(int(row["pid"]))
    return found


def own_processes(proc: Path = PROC, own_pid: int | None = None) -> set[int]:
    """Return a process and its descendants."""
    return _descendants({pid: parent for pid, (parent, _) in _processes(proc)}, own_pid or os.getpid())


def _descendants(parents: dict[int, int], pid: int) -> set[int]:
    own, added = {pid}, 1
    while added:
        more = {one for one, parent in parents.items() if parent in own} - own
        own, added = own | more, len(more)
    return own


def _processes(proc: Path) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield each process with its parent, and its ticks with those of its ended children."""
    try:
        entries = [entry for entry in os.scandir(proc) if entry.name.isdigit()]
    except OSError:
        return
    for entry in entries:
        try:
            fields = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")[2].split()
            yield int(entry.name), (int(fields[1]), sum(int(ticks) for ticks in fields[11:15]))
        except (OSError, ValueError, IndexError):  # it has ended
            continue


def nvidia_table() -> str | None:
    """Return the driver's table of processes; None where there is no such program, or no answer."""
    try:
        done = subprocess.run(
            GPU_COMMAND, capture_output=True, text=True, check=False, timeout=GPU_ANSWER_S_MAX, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.debug("%s: %s", GPU_COMMAND[0], error)
        return None
    return done.stdout if done.returncode == 0 else None
