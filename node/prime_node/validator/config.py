"""Settings of a validator: the [validator] table."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.config import SandboxSettings, Settings, SettingsConfigDict


class ValidatorConfig(Settings):
    model_config = SettingsConfigDict(env_prefix="PRIME_VALIDATOR_")
    section: ClassVar[str] = "validator"

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the forward pass. Published weights are bf16 either way; fp32 arithmetic is closest to any engine."""
    threads: int = Field(default=1, ge=1)
    """Threads of the forward pass. Processes that share a machine must not have more threads than cores in all."""
    base_model: str | None = None
    """Where this machine has the base of a run whose policies are adapters: a folder, or a hub's model name. None takes the name
    that the run gives."""
    prefetch: int = Field(default=2, ge=1, le=64)
    """Bundles fetched ahead of the one being judged."""
    scorers: int = Field(default=2, ge=1, le=64)
    """Bundles whose rewards are computed at the same time, beside the forward passes. Each needs a process that holds the run's
    environments; the first is started at once, others when all are busy."""
    policies_kept: int = Field(default=4, ge=1)
    """Policies held in memory; async_level + 1 is enough for all that can be asked."""
    mirrors: tuple[str, ...] = ()
    """URLs that serve the run's checkpoints beside the coordinator. None of them is trusted."""
    swarm: SwarmConfig = SwarmConfig(private=True)
    """How policies are fetched from workers and seeders. A validator serves nobody unless it is told to."""
    sandbox: SandboxSettings = SandboxSettings()
    """How this process confines itself."""
    pieces_bytes_max: int = Field(default=64 * 2**20, ge=2**20)
    """Memory for pieces of a checkpoint on their way."""
    parts_bytes_max: int = Field(default=64 * 2**30, ge=0)
    """Disk that downloaded parts may take."""
    poll_seconds: float = Field(default=0.5, gt=0.0)
    """How often to look for a new policy."""
    wait_seconds: float = Field(default=10.0, ge=0.0, le=30.0)
    """How long a request for work may be held open by the coordinator."""
    unsafe_skip_proofs: bool = False
    """Accept rollouts without a forward pass: logprobs and tokens are believed, so whoever joins decides what is learned. It is
    for experiments that show what the checks are for."""
