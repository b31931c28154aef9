"""Last sign of life of each worker, why it got no work, and its session. Soft state: after a restart all count as just seen.

Sessions: one machine at a time takes part with a key. Two machines that share a key would take each other's leases: each reports
the leases that it holds, and the others lapse. So a process names its session when it joins, and repeats the name in later
requests. While a session lasts, no other is admitted. It ends when its worker leaves, is banned, or misses HEARTBEATS_MISSED_MAX
heartbeats. So a machine that crashed and restarts, or whose folder was moved, waits no longer than that. Uploads and receipts
need no session: finished work counts from any machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from prime_node.coordinator.state.records import State
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import HeartbeatRequest, WorkerState

HEARTBEATS_MISSED_MAX = 4
"""Missed heartbeats after which a worker is lost."""


@dataclass(frozen=True, slots=True)
class LastSeen:
    """A worker's last sign of life."""

    at_s: float
    """Monotonic time."""
    state: WorkerState = WorkerState.IDLE
    policy_version: int = -1
    bundles_spooled: int = 0


class Presence:
    """Last signs of life of the active workers."""

    def __init__(self, *, heartbeat_s: float) -> None:
        self._silence_s_max = HEARTBEATS_MISSED_MAX * heartbeat_s
        self._seen: dict[str, LastSeen] = {}
        self._hints: dict[str, str] = {}

    def heard(self, worker: str, now_s: float) -> None:
        """Record any valid request, which is a sign of life."""
        old = self._seen.get(worker)
        self._seen[worker] = (
            LastSeen(now_s) if old is None else LastSeen(now_s, old.state, old.policy_version, old.bundles_spooled)
        )

    def reported(self, worker: str, beat: HeartbeatRequest, now_s: float) -> None:
        """Record a heartbeat."""
        self._seen[worker] = LastSeen(now_s, beat.state, beat.policy_version, beat.bundles_spooled)

    def forget(self, worker: str) -> None:
        """Forget a worker."""
        self._seen.pop(worker, None)
        self._hints.pop(worker, None)

    def set_hint(self, worker: str, hint: str) -> None:
        """Record why a worker's last request for work got nothing, for its screen and the operator; empty if it got a lease."""
        if hint:
            self._hints[worker] = hint
        else:
            self._hints.pop(worker, None)

    def hint(self, worker: str) -> str:
        """Return why a worker's last request for work got nothing; empty if it did."""
        return self._hints.get(worker, "")

    def lasts_s(self, worker: str, now_s: float) -> float:
        """Return the seconds until a worker is lost if it sends nothing more."""
        seen = self._seen.get(worker)
        return self._silence_s_max if seen is None else max(0.0, seen.at_s + self._silence_s_max - now_s)

    def get(self, worker: str) -> LastSeen | None:
        """Return a worker's last sign of life, if known."""
        return self._seen.get(worker)

    def silent(self, active: Iterable[str], now_s: float) -> tuple[str, ...]:
        """Return those of `active` that were silent for too long.

        Start counting for unknown workers, and forget those that are not in `active`.
        """
        active = set(active)
        self._seen = {worker: seen for worker, seen in self._seen.items() if worker in active}
        lost = []
        for worker in sorted(active):
            seen = self._seen.setdefault(worker, LastSeen(now_s))
            if now_s - seen.at_s > self._silence_s_max:
                lost.append(worker)
        self._hints = {worker: hint for worker, hint in self._hints.items() if worker in active}
        return tuple(lost)


def require_session(state: State, presence: Presence, signer: str, session: str, now_s: float) -> None:
    """Raise RemoteError(IN_USE) if the key takes part in another session."""
    worker = state.workers.get(signer)
    if worker is None or not worker.active or worker.session == session:
        return
    since = datetime.fromtimestamp(worker.joined_at_ms / 1_000, UTC)
    wait_s = presence.lasts_s(signer, now_s)
    raise RemoteError(
        ErrorCode.IN_USE,
        (
            f"another machine has used this key since {since:%Y-%m-%d %H:%M:%S} UTC. Give each machine its own "
            f"identity, or stop the other one. If it has already stopped, this machine is admitted {wait_s:.0f} s "
            "after its last request"
        ),
        retry_after_s=min(wait_s, limits.RETRY_AFTER_S_MAX),
    )
