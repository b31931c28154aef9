"""How long after its publication a policy could be used, as the workers say. Soft state, to see and to choose k by.

Nobody proves these numbers, so each worker has one voice a policy, and what is told are ranks: the longest of several claims
moves none of them.

The time is b in the rule for the async level: a policy that takes b seconds to arrive and T to train needs k >= 1 + b / T.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import Any

POLICIES_MAX = 64
"""The newest policies that are remembered."""
MOST = 0.9
"""The share of the workers that the longer of the two times is of; of two or more, the slowest is never in it."""
OUTLIER_FACTOR = 4.0
"""A histogram counts no claim as longer than so many medians: its sum is of all workers."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one policy. Example: Spread(policy_version=41, workers=3, median_s=0.4, most_s=0.5)."""

    policy_version: int
    workers: int
    """That have reported."""
    median_s: float
    """The lower one, where there are two."""
    most_s: float
    """Nine of ten could use it by then."""


class TimesToUsable:
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
        return [self._spread(version) for version in sorted(self._seconds)]

    def most_s(self, policy_version: int) -> float | None:
        """By when nine of ten workers could use it; None where nobody has said anything."""
        return self._spread(policy_version).most_s if policy_version in self._seconds else None

    def clipped_s(self, policy_version: int, seconds: float) -> float:
        """A claim that has been heard, no longer than OUTLIER_FACTOR medians."""
        return min(seconds, OUTLIER_FACTOR * self._spread(policy_version).median_s)

    def _spread(self, policy_version: int) -> Spread:
        found = sorted(self._seconds[policy_version].values())
        median_s, most_s = median_low(found), found[int(MOST * (len(found) - 1))]
        return Spread(policy_version, len(found), median_s, max(median_s, most_s))

    def as_rows(self, count: int) -> list[dict[str, Any]]:
        """Of the newest policies, for the status."""
        return [
            {
                "policy_version": spread.policy_version,
                "workers": spread.workers,
                "median_s": round(spread.median_s, 3),
                "most_s": round(spread.most_s, 3),
            }
            for spread in self.spreads()[-count:]
        ]
