"""Present activity of a worker: the leases in hand, and its measured speed."""

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
    in_hand: dict[str, str] = field(default_factory=dict)
    """Leases that are queued, in generation or being written to the spool, each with the digest of its payload."""
    finished_s: float = 0.0
    """Monotonic time at which the engine last finished a lease."""
    rollouts_generated: int = 0
    leases_dropped: int = 0
    pace: GenerationPace = field(default_factory=GenerationPace)
    speed: Speed | None = None
    """Speed measured by the rehearsal, for the coordinator."""
