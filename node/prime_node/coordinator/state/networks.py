"""Sums over the keys of a network. Only newcomers.py changes them."""

from __future__ import annotations

from dataclasses import dataclass, field

from prime_node.carrier import carrier


@carrier(frozen=True, slots=True)
class Part:
    """One worker's contribution to the sums of its network, as last counted (newcomers.py)."""

    keys: int = 0
    active: int = 0
    newcomers: int = 0
    """1 for an active newcomer; the next two are 0 for any other worker."""
    held: int = 0
    """Its open leases and pending bundles."""
    passed: int = 0
    """Audits that it has passed."""


NOTHING, ABSENT, PRESENT = Part(), Part(1), Part(1, 1)
"""The parts of an unknown worker, an inactive one, and an active one that is no newcomer.

They are shared objects, because nearly every event leaves a worker's part unchanged."""


@dataclass(slots=True)
class Network:
    """Sums over the remembered keys that joined from one network."""

    keys: int = 0
    active: int = 0
    newcomers: int = 0
    held: int = 0
    passed: int = 0
    bans: int = 0
    """Bans of its keys, without those that were lifted."""
    banned_at_ms: int = 0
    """Time of the last ban."""
    away: dict[str, None] = field(default_factory=dict)
    """Keys that may be forgotten, the longest inactive first."""

    broken: int = 0
    """Leases that its newcomers abandoned since one of them had a bundle accepted."""

    @property
    def crowd(self) -> int:
        """Its active newcomers except one."""
        return max(0, self.newcomers - 1)
