"""Settings of the coordinator: the [coordinator] table. What a run is, is in its RunSpec; this is how it is served."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from prime_node.config import Settings, SettingsConfigDict
from prime_protocol.limits import TIMESTAMP_LIFETIME_S_MAX


class CoordinatorConfig(Settings):
    model_config = SettingsConfigDict(env_prefix="PRIME_COORDINATOR_")
    section: ClassVar[str] = "coordinator"

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines join."""
    port: int = Field(default=8400, ge=0, le=65_535)
    """Port to listen on; 0 takes any free one."""
    tick_seconds: float = Field(default=0.5, gt=0.0)
    """How often expired leases, silent workers and overdue checks are looked for."""
    check_seconds: float = Field(default=30.0, gt=0.0)
    """How long a validator has for one bundle before another one gets it."""
    check_attempts_max: int = Field(default=3, ge=1)
    """A bundle that this many validators left unanswered is refused as unverifiable; its groups are leased again."""
    snapshot_events: int = Field(default=2_000, ge=1)
    """A snapshot of the state is written after this many events; a restart replays at most these."""
    checkpoints_kept: int | None = Field(default=None, ge=1)
    """Newest policies whose every encoding is kept, beside the anchor of policy 0 and the cheapest way from nothing to each of
    them. A worker that was away longer begins from there. None keeps all, so that the whole chain can be verified."""
    requests_per_second: float = Field(default=50.0, gt=0.0)
    """Signed requests of one worker, sustained; a burst of ten times as many is allowed."""
    faults_per_second: float = Field(default=5.0, gt=0.0)
    """Faulty requests and new keys from one network address, sustained; a burst of fifty times as many is allowed.
    Beyond that, keys that neither take part nor belong to the run are turned away there."""
    nonces_max: int = Field(default=1_000_000, ge=1_000)
    """Nonces remembered against replays, about 200 bytes each. When they are used up, requests are turned away for a while."""
    timestamp_seconds: float = Field(default=30.0, gt=0.0)
    """How often the statement of which policy and keys are newest is signed anew."""
    timestamp_lifetime_seconds: float = Field(default=600.0, ge=1.0, le=TIMESTAMP_LIFETIME_S_MAX)
    """How long one holds. A worker that has seen none for longer takes no new work: it may be shown a frozen run."""
    grace_seconds: float = Field(default=5.0, ge=0.0)
    """How long requests under way may take to finish when the coordinator stops."""
