"""Settings of a validator: the [validator] table."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.config import SandboxSettings, Settings, SettingsConfigDict


class ValidatorConfig(Settings):
    """A validator's settings."""

    model_config = SettingsConfigDict(env_prefix="PRIME_VALIDATOR_")
    section: ClassVar[str] = "validator"

    engine: Literal["transformers", "vllm"] = "transformers"
    """Engine of the forward pass. vllm of the workers' build and dtype runs the same kernels as they do: honest logprobs come
    out almost bit for bit, and other weights show within a bundle. It needs a calibration with such a validator."""
    dtype: Literal["fp32", "bf16", "bf16-fp32head"] = "fp32"
    """Arithmetic of the forward pass. With transformers fp32 is closest to any engine; with vllm it should be the workers'.
    bf16-fp32head, for vllm only, computes the output head in fp32. Published weights are bf16 either way."""
    device: str = "cpu"
    """Device of the transformers engine, in torch's notation, such as "cuda". The run's calibration must know it: make the run on
    such a machine. vLLM computes where its build does."""
    gpu_memory_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of a GPU's memory that vLLM takes. None: what `up` plans, otherwise 0.9."""
    cpu_cache_gib: int = Field(default=1, ge=1)
    """Memory for vLLM's key-value cache on a CPU, in GiB."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the forward pass. All processes on a machine together should not have more threads than cores."""
    base_model: str | None = None
    """Local base model of a run whose policies are adapters: a folder, or a hub's model name. None: the name that the
    run gives."""
    prefetch: int = Field(default=2, ge=1, le=64)
    """Bundles fetched ahead of those being verified."""
    batch_tokens: int = Field(default=4096, ge=1)
    """Largest number of completion tokens of bundles that share a forward pass. Only fetched bundles of one policy do, so
    raise `prefetch` too where a forward pass of few tokens wastes the device. 1: each bundle has its own, as in runs that compare
    rewards of unseeded bundles."""
    scorers: int = Field(default=2, ge=1, le=64)
    """Bundles whose rewards are computed concurrently, in parallel to the forward passes. Each needs a process that
    holds the run's environments. The first one starts at once, others when all are busy."""
    policies_kept: int = Field(default=4, ge=1)
    """Policies held in memory; async_level + 1 is enough for every possible request."""
    mirrors: tuple[Annotated[str, Field(pattern="^https?://.")], ...] = ()
    """URLs that serve the run's checkpoints besides the coordinator. None of them is trusted."""
    swarm: SwarmConfig = SwarmConfig(private=True)
    """Exchange of policies with workers and seeders. By default a validator serves no peers."""
    sandbox: SandboxSettings = SandboxSettings()
    """Sandbox of this process."""
    policies_bytes_max: int | None = Field(default=None, ge=2**20)
    """Memory for decoded policies. A larger one ends the process with an error. None: nine tenths of the memory that is
    available when a policy is decoded."""
    parts_bytes_max: int = Field(default=64 * 2**30, ge=0)
    """Disk space for downloaded parts."""
    poll_seconds: float = Field(default=0.5, gt=0.0)
    """Seconds between polls for a new policy."""
    wait_seconds: float = Field(default=10.0, ge=0.0, le=30.0)
    """Seconds for which the coordinator may hold a request for work open."""
    unsafe_skip_proofs: bool = False
    """Accept rollouts without a forward pass. Logprobs and tokens are then unverified, so anyone who joins decides what
    is learned. For experiments that show what the checks are for."""

    @property
    def kind(self) -> str:
        """Engine, arithmetic and, unless it is the CPU, device of the forward pass. Example: "transformers/fp32"."""
        kind = f"{self.engine}/{self.dtype}"
        on_cpu = self.engine == "vllm" or self.device == "cpu"
        return kind if on_cpu else f"{kind}/{self.device.partition(':')[0]}"
