"""Time to available: how long after its publication a policy could be used, as workers report it. Soft state, for choosing k.

These numbers are not verified, so each worker has one report per policy, and the statistics are ranks: the longest of several
claims changes none of them.

The time is b in the rule for the async level: a policy that takes b seconds to arrive and T to train needs k >= 1 + b / T.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import Any

POLICIES_MAX = 64
"""Newest policies that are remembered."""
MOST = 0.9
"""Share of the workers in the longer of the two times. With two or more workers, the slowest is never in it."""
OUTLIER_FACTOR = 4.0
"""Maximum of a claim in the histogram, in medians, because the histogram's sum includes all workers."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The times of one policy. Example: Spread(policy_version=41, workers=3, median_s=0.4, most_s=0.5)."""

    policy_version: int
    workers: int
    """Workers that have reported."""
    median_s: float
    """Median; the lower one of two."""
    most_s: float
    """Time by which nine of ten workers could use it."""


class TimesToAvailable:
    """The times in heartbeats."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[str, float]] = {}
        """Seconds by policy, then by worker."""

    def heard(self, worker: str, policy_version: int, after_ms: int) -> bool:
        """Record a report. Return True for a worker's first report about a policy that is remembered."""
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
        """Return the spread of each policy, the newest last."""
        return [self._spread(version) for version in sorted(self._seconds)]

    def most_s(self, policy_version: int) -> float | None:
        """Return the time by which nine of ten workers could use it; None without reports."""
        return self._spread(policy_version).most_s if policy_version in self._seconds else None

    def clipped_s(self, policy_version: int, seconds: float) -> float:
        """Return a recorded claim, limited to OUTLIER_FACTOR medians."""
        return min(seconds, OUTLIER_FACTOR * self._spread(policy_version).median_s)

    def _spread(self, policy_version: int) -> Spread:
        found = sorted(self._seconds[policy_version].values())
        median_s, most_s = median_low(found), found[int(MOST * (len(found) - 1))]
        return Spread(policy_version, len(found), median_s, max(median_s, most_s))

    def as_rows(self, count: int) -> list[dict[str, Any]]:
        """Return the rows of the newest policies, for the status."""
        return [
            {
                "policy_version": spread.policy_version,
                "workers": spread.workers,
                "median_s": round(spread.median_s, 3),
                "most_s": round(spread.most_s, 3),
            }
            for spread in self.spreads()[-count:]
        ]
