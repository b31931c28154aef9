"""What is kept of a network, summed over its keys. newcomers.py is the only one that changes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from prime_node.coordinator.state.carrier import carrier


@carrier(frozen=True, slots=True)
class Part:
    """What one worker adds to the sums of its network, as it was last counted (newcomers.py)."""

    keys: int = 0
    active: int = 0
    newcomers: int = 0
    """1 for a newcomer that takes part; the next two are 0 for anybody else."""
    held: int = 0
    """Its open leases and its bundles without a verdict."""
    passed: int = 0
    """Audits that it has passed."""


NOTHING, ABSENT, PRESENT = Part(), Part(1), Part(1, 1)
"""Not known; known, and no newcomer that takes part. Shared: nearly every event leaves a worker what it was."""


@dataclass(slots=True)
class Network:
    """Sums over the keys that joined from one network and are remembered."""

    keys: int = 0
    active: int = 0
    newcomers: int = 0
    held: int = 0
    passed: int = 0
    bans: int = 0
    """Of its keys, those that were lifted left out."""
    banned_at_ms: int = 0
    """The last one."""
    away: dict[str, None] = field(default_factory=dict)
    """Those that may be forgotten, the longest away first."""

    broken: int = 0
    """Leases that its newcomers let go since a bundle of one of them was accepted."""

    @property
    def crowd(self) -> int:
        """Its newcomers that take part, but for one of them."""
        return max(0, self.newcomers - 1)
