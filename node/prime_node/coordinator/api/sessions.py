"""Sessions: one machine at a time takes part with a key.

Two machines that share a key would take each other's leases: each reports the leases that it holds, and the others lapse. So a
process names its session when it joins, and repeats the name in later requests. While a session lasts, no other is admitted. It
ends when its worker leaves, is banned, or misses HEARTBEATS_MISSED_MAX heartbeats. So a machine that crashed and restarts, or
whose folder was moved, waits no longer than that. Uploads and receipts need no session: finished work counts from any machine.
"""

from __future__ import annotations

from datetime import UTC, datetime

from prime_node.coordinator.presence import Presence
from prime_node.coordinator.state.records import State
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError


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
