"""What a peer says of itself, for display. None of it is proven, so each number has a bound that a real machine satisfies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Name, Step
from prime_protocol.envelope import WireModel

ClaimedBytes = Annotated[int, Field(ge=0, le=limits.CLAIMED_BYTES_MAX)]


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


class DownloadReport(WireModel):
    """Bytes of checkpoints that a worker has received since its start, and the download that is in progress.

    Example: DownloadReport(peer_bytes=90_000_000, operator_bytes=4_000_000, links=6, done_bytes=1_200_000, all_bytes=4_100_000).
    """

    peer_bytes: ClaimedBytes
    """From other contributors."""
    operator_bytes: ClaimedBytes
    """From the coordinator, the trainer and mirrors."""
    links: int = Field(ge=0, le=limits.CLAIMED_LINKS_MAX)
    """Peers that it is linked to."""
    done_bytes: ClaimedBytes = 0
    """Verified bytes of the download in progress."""
    all_bytes: ClaimedBytes = 0
    """Size of the download in progress; 0 if there is none."""


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
