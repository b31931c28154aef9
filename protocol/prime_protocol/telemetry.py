"""What a peer says of itself, for display. None of it is proven, so each number has a bound that a real machine satisfies."""

from __future__ import annotations

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Name, Step
from prime_protocol.envelope import WireModel


class Hardware(WireModel):
    """Description of a worker's machine, by the worker. For display only; leases depend on measured speed."""

    device: Name
    """Name of the GPU, or architecture of the processor."""
    cores: int = Field(ge=0, le=limits.CLAIMED_CORES_MAX)
    memory_bytes: int = Field(ge=0, le=limits.CLAIMED_MEMORY_BYTES_MAX)
    """Memory of the GPU if there is one, otherwise of the machine."""


class Speed(WireModel):
    """Speed that a worker claims after sampling a few tokens of the policy that it holds. SPEC.md, section 14.

    Example: Speed(rollout_ms=120, tokens_per_s=2_100, download_bytes_per_s=12_000_000).
    """

    rollout_ms: int = Field(ge=1, le=limits.CLAIMED_MS_MAX)
    """Maximum time of one completion of this run, if the worker samples its preferred number at once."""
    tokens_per_s: int = Field(ge=0, le=limits.CLAIMED_TOKENS_PER_S_MAX)
    download_bytes_per_s: int = Field(ge=0, le=limits.CLAIMED_BYTES_PER_S_MAX)
    """Download speed of its first policy; 0 if it had that already."""


class Interval(WireModel):
    """A mean over held-out problems with its 95 % confidence interval. Example: Interval(mean=0.46, low=0.4, high=0.52)."""

    mean: float = Field(ge=0.0, le=1.0)
    low: float = Field(ge=0.0, le=1.0)
    high: float = Field(ge=0.0, le=1.0)


class HeldOutFigures(WireModel):
    """Share of exact answers of one policy on held-out problems, measured by the trainer."""

    policy_version: Step
    greedy: Interval | None = None
    sampled: Interval | None = None
