"""Present activity of a worker: the leases in hand, and the policy in its engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from prime_node.worker.pace import GenerationPace
from prime_protocol.requests import WorkerState
from prime_protocol.telemetry import Speed


@dataclass
class LeaseActivity:
    """The work on leases: written by work.py and loop.py, read for heartbeats and for the status."""

    state: WorkerState = WorkerState.FETCHING
    waiting_for: str = ""
    """Reason why no lease is requested or granted; empty if there is none."""
    in_hand: set[str] = field(default_factory=set)
    """Leases that are queued, in generation or being written to the spool."""
    rollouts_generated: int = 0
    leases_dropped: int = 0
    pace: GenerationPace = field(default_factory=GenerationPace)
    speed: Speed | None = None
    """Speed measured by the rehearsal, for the coordinator."""


@dataclass
class LoadedPolicy:
    """The policy in the engine, and how long the last swap to it took."""

    version: int = -1
    """Policy that the engine holds; -1 if it must be loaded again."""
    newest: int = -1
    """Newest policy that the engine has held."""
    usable_after_ms: int | None = None
    """Time from the held policy's publication until the engine had it; None if it is not meaningful for its update path."""
    swap_ms: int | None = None
    """Part of that time spent in the engine."""

    def swapped(self, version: int, *, usable_after_ms: int | None, swap_ms: int) -> None:
        """Record a swap. Its times count only if the policy is newer than an earlier one."""
        counts = usable_after_ms is not None and version > self.newest >= 0
        self.usable_after_ms, self.swap_ms = (usable_after_ms, swap_ms) if counts else (None, None)
        self.version, self.newest = version, max(version, self.newest)
