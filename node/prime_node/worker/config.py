"""Settings of a worker: the [worker] table."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.config import SandboxSettings, Settings, SettingsConfigDict
from prime_node.worker.control import WorkLimits
from prime_protocol import limits
from prime_protocol.assignment import Name


class NodePageConfig(BaseModel):
    """The worker's own page in a browser of this machine: what the worker does, and its controls."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = True
    """Serve the page. Only this machine reaches it, and only with a key that `prime-node open` shows."""
    host: Literal["127.0.0.1", "::1"] = "127.0.0.1"
    """Loopback address that it is served on."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port that it is served on; 0 takes any free one."""


class WorkerConfig(Settings):
    """A worker's settings."""

    model_config = SettingsConfigDict(env_prefix="PRIME_WORKER_")
    section: ClassVar[str] = "worker"

    name: Name = "worker"
    """Name of this machine. The operator sees it; it proves nothing."""
    invite: str = Field(default="", max_length=limits.INVITE_CHARS_MAX)
    """Invitation from the run's operator, if the run accepts invited keys only. One in the join link replaces it."""
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """Inference engine. auto: vLLM if there is a GPU, else transformers, which starts in seconds."""
    seeded: bool = True
    """Choose tokens by the assigned randomness. false: vLLM's own sampler chooses, without a logits processor. Few runs
    accept that (checks.unseeded), and every bundle is then audited."""
    dtype: Literal["auto", "fp32", "bf16", "bf16-fp32head"] = "auto"
    """Arithmetic of the engine. auto: bf16 on a GPU, fp32 on a CPU. bf16 needs half the memory, and a run whose checks allow
    for its noise: `prime-node calibrate`. bf16-fp32head, for vllm only, computes the output head in fp32."""
    model_runner: Literal["v1", "v2"] = "v1"
    """vLLM's model runner. v2 schedules steps ahead and adds the noise in one kernel. It needs Triton, so a GPU, on which it has
    never run yet."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of the engine. All processes on a machine together should not have more threads than cores."""
    cpu_cache_gib: float = Field(default=1.0, gt=0.0)
    """Memory for vLLM's key-value cache on a CPU, in GiB. On a GPU it uses what gpu_memory_share leaves."""
    gpu_memory_share: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of a GPU's memory that vLLM takes, for weights, keys and values. None: what `up` plans, otherwise 0.9."""
    tensor_parallel: int | None = Field(default=None, ge=1, le=64)
    """GPUs among which vLLM divides the model. None: what `up` plans, as few as fit; otherwise 1. Several GPUs that each hold the
    model are used by a worker process each."""
    base_model: str | None = None
    """Local base model of a run whose policies are adapters: a folder, or a hub's model name. None: the name that the
    run gives."""
    sequences_max: int = Field(default=256, ge=1, le=4_096)
    """Completions that vLLM computes side by side. It is kept full from several leases; transformers takes one at a time."""
    rollouts_max: int = Field(default=128, ge=1, le=limits.LEASE_ROLLOUTS_MAX)
    """Completions requested in one lease. A machine that measures itself as slow requests fewer by itself."""
    leases_ahead: int | None = Field(default=None, ge=0, le=8)
    """Leases fetched before the engine has room for them; none if the run is on-policy. Unset: 1 while a lease takes less
    than 50 round trips to the coordinator, else 0, because a lease queued behind a long completion delays its batch."""
    wait_seconds: float = Field(default=10.0, ge=0.0, le=30.0)
    """Seconds for which the coordinator may hold a request for work open."""
    poll_seconds: float = Field(default=0.5, gt=0.0)
    """Seconds between polls for a new policy."""
    mirrors: tuple[Annotated[str, Field(pattern="^https?://.")], ...] = ()
    """URLs that serve the run's checkpoints besides the coordinator. None of them is trusted; over http, others on the way see
    what is fetched."""
    swarm: SwarmConfig = SwarmConfig()
    """Exchange of policies with other workers."""
    limits: WorkLimits = WorkLimits()
    """When it computes and how much it uses. `prime-node limit` and the page replace all of them while it runs."""
    page: NodePageConfig = NodePageConfig()
    """Page in a browser of this machine."""
    sandbox: SandboxSettings = SandboxSettings()
    """Sandbox of this process."""
    policies_kept: int = Field(default=2, ge=2, le=64)
    """Policies held in memory besides the engine's own copy."""
    policies_bytes_max: int | None = Field(default=None, ge=2**20)
    """Memory for decoded policies. A larger one ends the process with an error. None: nine tenths of the memory that is
    available when a policy is decoded."""
    parts_bytes_max: int = Field(default=64 * 2**30, ge=0)
    """Disk space for downloaded parts. Above it an interrupted download starts again."""
    spool_bytes_max: int = Field(default=2**30, ge=2**20)
    """Disk space for finished work while the coordinator is unreachable. When it is full, generation pauses."""
    receipts_seconds: float = Field(default=10.0, gt=0.0)
    """Seconds between fetches of receipts."""
    status_seconds: float = Field(default=5.0, gt=0.0)
    """Seconds between two looks at the status. A log gets a line when what the worker does or waits for changes, and each
    minute."""
    grace_seconds: float = Field(default=30.0, ge=0.0)
    """Seconds, after a request to stop, to finish and upload the work in progress. Anything not uploaded stays in the spool.
    After Ctrl-C it is half a second: unfinished leases are handed back."""
