"""Present activity of a worker: the leases in hand, and its measured speed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from prime_node.worker.control import Wanted, WorkLimits
from prime_node.worker.pace import GenerationPace
from prime_protocol.requests import WorkerState
from prime_protocol.telemetry import Speed

HOLDING_MAX = 1_024
"""Maximum number of leases that a request may name."""


@dataclass(frozen=True, slots=True)
class LeaseInHand:
    """A lease that is queued, in generation or being written to the spool."""

    digest: str
    """Digest of its payload."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Event set once its bundle could no longer be used, or the contributor pauses."""


@dataclass
class LeaseActivity:
    """The work on leases: written by work.py and loop.py, read for heartbeats and for the status."""

    state: WorkerState = WorkerState.FETCHING
    waiting_for: str = ""
    """Reason why no lease is requested or granted; empty if there is none."""
    paused: str = ""
    """Reason why nothing may be computed: the contributor's pause or limits; empty if there is none."""
    wanted: Wanted = Wanted.RUN
    """What the contributor wants, as far as it is read."""
    limits: WorkLimits | None = None
    """Limits that are in force; None until they are read."""
    control_at_ms: int = 0
    """Time of the contributor's last command that is followed."""
    in_hand: dict[str, LeaseInHand] = field(default_factory=dict)
    finished_s: float = 0.0
    """Monotonic time at which the engine last finished a lease."""
    rollouts_generated: int = 0
    tokens_generated: int = 0
    leases_dropped: int = 0
    pace: GenerationPace = field(default_factory=GenerationPace)
    speed: Speed | None = None
    """Speed measured by the rehearsal, for the coordinator."""

    def cancel(self, lease_ids: Iterable[str]) -> None:
        """Stop the work on leases: the coordinator can no longer use them, or the contributor pauses."""
        for lease_id in self.in_hand.keys() & set(lease_ids):
            self.in_hand[lease_id].cancelled.set()
