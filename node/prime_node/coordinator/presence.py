"""Last sign of life of each worker, why it got no work, and its session. Soft state: after a restart all count as just seen.

Sessions: one machine at a time takes part with a key. Two machines that share a key would take each other's leases: each reports
the leases that it holds, and the others lapse. So a process names its session when it joins, and repeats the name in later
requests. While a session lasts, no other is admitted. It ends when its worker leaves, is banned, or misses HEARTBEATS_MISSED_MAX
heartbeats. So a machine that crashed and restarts, or whose folder was moved, waits no longer than that. Uploads and receipts
need no session: finished work counts from any machine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from datetime import UTC, datetime

from prime_node.carrier import carrier
from prime_node.coordinator.state.records import State, WorkerRecord
from prime_node.patience import PAUSE_S_MAX
from prime_node.ports.clock import Clock
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import HeartbeatRequest, WorkerState
from prime_protocol.telemetry import DownloadReport

HEARTBEATS_MISSED_MAX = 4
"""Missed heartbeats after which a worker is lost."""


@carrier(frozen=True, slots=True)
class LastSeen:
    """A worker's last sign of life."""

    at_s: float
    """Monotonic time."""
    state: WorkerState = WorkerState.IDLE
    policy_version: int = -1
    bundles_spooled: int = 0
    downloads: DownloadReport | None = None
    """What the worker says of its downloads; None: nothing."""


class Presence:
    """Last signs of life of the active workers."""

    def __init__(self, *, heartbeat_s: float) -> None:
        self._silence_s_max = HEARTBEATS_MISSED_MAX * heartbeat_s
        self._seen: dict[str, LastSeen] = {}
        """Signs of life, the oldest first, so that `silent` looks at those of silent workers alone."""
        self._hints: dict[str, str] = {}
        self._excused_s = -math.inf

    def heard(self, worker: str, now_s: float) -> None:
        """Record any valid request, which is a sign of life."""
        old = self._seen.pop(worker, None)
        self._seen[worker] = (
            LastSeen(now_s)
            if old is None
            else LastSeen(now_s, old.state, old.policy_version, old.bundles_spooled, old.downloads)
        )

    def reported(self, worker: str, beat: HeartbeatRequest, now_s: float) -> None:
        """Record a heartbeat."""
        self._seen.pop(worker, None)
        self._seen[worker] = LastSeen(now_s, beat.state, beat.policy_version, beat.bundles_spooled, beat.downloads)

    def excuse(self, now_s: float, seconds: float = PAUSE_S_MAX) -> None:
        """Record that heartbeats were refused for load, or not read: no worker counts as silent until it may have sent more.

        A worker that was refused several times in a row repeats its heartbeat after PAUSE_S_MAX at most.
        """
        self._excused_s = max(self._excused_s, now_s + seconds)

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

    def doing(self, worker: WorkerRecord) -> str:
        """Return a worker's state in a word."""
        if worker.banned is not None:
            return "banned"
        seen = self.get(worker.worker) if worker.active else None
        return "away" if not worker.active else "idle" if seen is None else str(seen.state)

    def lasts_s(self, worker: str, now_s: float) -> float:
        """Return the seconds until a worker is lost if it sends nothing more."""
        seen = self._seen.get(worker)
        since_s = now_s if seen is None else max(seen.at_s, self._excused_s)
        return max(0.0, since_s + self._silence_s_max - now_s)

    def get(self, worker: str) -> LastSeen | None:
        """Return a worker's last sign of life, if known."""
        return self._seen.get(worker)

    def silent(self, active: Collection[str], now_s: float) -> tuple[str, ...]:
        """Return those of `active` that were silent for too long, and forget them and others that were.

        Start counting for unknown workers, which all are after a restart.
        """
        if len(self._seen) < len(active):
            for worker in active:
                self._seen.setdefault(worker, LastSeen(now_s))
        lost = []
        while self._seen:
            worker, seen = next(iter(self._seen.items()))
            if now_s - max(seen.at_s, self._excused_s) <= self._silence_s_max:
                break
            self.forget(worker)
            if worker in active:
                lost.append(worker)
        return tuple(sorted(lost))


class ActiveWorkers(Collection[str]):
    """The keys of a state's active workers, without a copy."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __contains__(self, worker: object) -> bool:
        known = self._state.workers.get(worker) if isinstance(worker, str) else None
        return known is not None and known.active

    def __iter__(self) -> Iterator[str]:
        return (key for key, worker in self._state.workers.items() if worker.active)

    def __len__(self) -> int:
        return self._state.num_active


def require_session(state: State, presence: Presence, signer: str, session: str, clock: Clock) -> None:
    """Raise RemoteError(IN_USE) if the key takes part in another session."""
    worker = state.workers.get(signer)
    if worker is None or not worker.active or worker.session == session:
        return
    since = datetime.fromtimestamp(worker.joined_at_ms / 1_000, UTC)
    wait_s = presence.lasts_s(signer, clock.monotonic_s())
    raise RemoteError(
        ErrorCode.IN_USE,
        (
            f"another machine has used this key since {since:%Y-%m-%d %H:%M:%S} UTC. Give each machine its own "
            f"identity, or stop the other one. If it has already stopped, this machine is admitted {wait_s:.0f} s "
            "after its last request"
        ),
        retry_after_s=min(wait_s, limits.RETRY_AFTER_S_MAX),
    )
