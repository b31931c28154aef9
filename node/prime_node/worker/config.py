"""Settings of a worker: the [worker] table."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.config import SandboxSettings, Settings, SettingsConfigDict
from prime_protocol import limits
from prime_protocol.assignment import Name


class WorkerConfig(Settings):
    model_config = SettingsConfigDict(env_prefix="PRIME_WORKER_")
    section: ClassVar[str] = "worker"

    name: Name = "worker"
    """What you call this machine. The operator sees it; it proves nothing."""
    invite: str = Field(default="", max_length=limits.INVITE_CHARS_MAX)
    """The invitation that the run's operator has sent you, where the run takes invited keys only."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Inference engine. auto: vLLM where there is a GPU, else transformers, which starts in seconds."""
    seeded: bool = True
    """Choose tokens by the assigned randomness. false: vLLM's own sampler chooses, without a logits processor. Few runs take that
    (checks.unseeded), and every bundle is audited then."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine. Processes that share a machine must not have more threads than cores in
    all."""
    cpu_cache_gib: int = Field(default=1, ge=1)
    """Memory for vLLM's key-value cache on a CPU, in GiB. On a GPU it takes what is left."""
    base_model: str | None = None
    """Where this machine has the base of a run whose policies are adapters: a folder, or a hub's model name. None takes the name
    that the run gives."""
    rollouts_max: int = Field(default=128, ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    """Completions asked for in one lease. A machine that measures itself as slow asks for fewer by itself."""
    leases_ahead: int = Field(default=1, ge=0, le=8)
    """Leases fetched while another one is generated, so that the engine never waits for a round trip; none where the run is
    on-policy. Where a lease takes minutes, 0 is better: what waits in line behind a long completion holds up its batch."""
    wait_seconds: float = Field(default=10.0, ge=0.0, le=30.0)
    """How long the coordinator may hold a request for work open."""
    poll_seconds: float = Field(default=0.5, gt=0.0)
    """How often to look for a new policy."""
    mirrors: tuple[str, ...] = ()
    """URLs that serve the run's checkpoints beside the coordinator. None of them is trusted."""
    swarm: SwarmConfig = SwarmConfig()
    """How policies are exchanged with other workers."""
    sandbox: SandboxSettings = SandboxSettings()
    """How this process confines itself."""
    policies_kept: int = Field(default=2, ge=2, le=64)
    """Policies held in memory beside the engine's own copy."""
    pieces_bytes_max: int = Field(default=64 * 2**20, ge=2**20)
    """Memory for pieces of a checkpoint on their way: asked for, arrived, or waiting to be decoded."""
    parts_bytes_max: int = Field(default=64 * 2**30, ge=0)
    """Disk that downloaded parts may take. Beyond it an interrupted download starts again."""
    spool_bytes_max: int = Field(default=2**30, ge=2**20)
    """Disk that finished work may take while the coordinator is away. When it is full, generation pauses."""
    receipts_seconds: float = Field(default=10.0, gt=0.0)
    """How often to fetch receipts."""
    status_seconds: float = Field(default=5.0, gt=0.0)
    """How often to say what is going on."""
    grace_seconds: float = Field(default=30.0, ge=0.0)
    """After a request to stop: time to finish what was begun and to upload it. What is not uploaded stays
    in the spool."""
