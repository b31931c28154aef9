"""What a worker claims of itself. Nothing here is proven, so each number has a bound that a real machine keeps."""

from __future__ import annotations

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Name
from prime_protocol.envelope import WireModel


class Hardware(WireModel):
    """What a worker says about its machine. For the operator; what it is leased follows from what was measured."""

    device: Name
    """The GPU's name, or the processor's architecture."""
    cores: int = Field(ge=0, le=limits.CLAIMED_CORES_MAX)
    memory_bytes: int = Field(ge=0, le=limits.CLAIMED_MEMORY_BYTES_MAX)
    """Of the GPU where there is one, else of the machine."""


class Speed(WireModel):
    """How fast a worker is, by its own word: it has sampled a few tokens of the policy that it holds. SPEC.md, section 14.

    Example: Speed(rollout_ms=120, tokens_per_s=2_100, download_bytes_per_s=12_000_000).
    """

    rollout_ms: int = Field(ge=1, le=limits.CLAIMED_MS_MAX)
    """One completion of this run takes it so long at most, where as many are sampled at once as it likes."""
    tokens_per_s: int = Field(ge=0, le=limits.CLAIMED_TOKENS_PER_S_MAX)
    download_bytes_per_s: int = Field(ge=0, le=limits.CLAIMED_BYTES_PER_S_MAX)
    """As its first policy came; 0 where it had that already."""
