"""How long after its publication a policy could be used, as the workers measured it. Soft state, to see and to choose k by.

The time is b in the rule for the async level: a policy that takes b seconds to arrive and T to train needs k >= 1 + b / T.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

POLICIES_MAX = 64
"""The newest policies that are remembered."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one policy. Example: Spread(policy_version=41, workers=3, median_s=0.4, last_s=1.9)."""

    policy_version: int
    workers: int
    """That have reported."""
    median_s: float
    last_s: float


class Usable:
    """What the heartbeats said."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[str, float]] = {}
        """By policy, then by worker."""

    def heard(self, worker: str, policy_version: int, after_ms: int) -> bool:
        """True for the first word of a worker about a policy that is remembered."""
        if policy_version not in self._seconds and len(self._seconds) == POLICIES_MAX:
            oldest = min(self._seconds)
            if policy_version < oldest:
                return False
            del self._seconds[oldest]
        known = self._seconds.setdefault(policy_version, {})
        if worker in known:
            return False
        known[worker] = after_ms / 1_000
        return True

    def spreads(self) -> list[Spread]:
        """The newest policy last."""
        return [
            Spread(version, len(seconds), median(seconds.values()), max(seconds.values()))
            for version, seconds in sorted(self._seconds.items())
        ]

    def as_rows(self, count: int) -> list[dict[str, Any]]:
        """Of the newest policies, for the status."""
        return [
            {
                "policy_version": spread.policy_version,
                "workers": spread.workers,
                "median_s": round(spread.median_s, 3),
                "last_s": round(spread.last_s, 3),
            }
            for spread in self.spreads()[-count:]
        ]
