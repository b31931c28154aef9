"""Last sign of life of each worker, and why it got no work. Soft state: after a restart all workers count as just seen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prime_protocol.messages import HeartbeatRequest, WorkerState

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
