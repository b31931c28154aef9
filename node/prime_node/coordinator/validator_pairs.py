"""Comparison of two validators of one class by their counts, over all the bundles that they judge.

Validators take bundles from one queue, so the results of two validators of one class differ only by chance. For each pair, the
coordinator counts how often either convicts, and how often either finds evidence of 10 to 1, while both are active. They differ
if two shares explain the counts DIFFER_FACTOR times as well as one does (both with uniform priors).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

PAIRS_MAX = 256
"""Pairs of validators whose verdicts are counted."""
DIFFER_FACTOR = 1e4


@dataclass(slots=True)
class VerdictCounts:
    """Counts of one validator of a pair, while the other was active."""

    judged: int = 0
    convicted: int = 0
    suspicious: int = 0


@dataclass(slots=True)
class ValidatorPairs:
    """Counts of the verdicts of each pair of validators."""

    _counts: dict[tuple[str, str], dict[str, VerdictCounts]] = field(default_factory=dict)

    def count(self, validator: str, others: Iterable[str], *, convicts: bool, is_suspicious: bool) -> str:
        """Count a verdict in the pairs of a validator with the active `others` of its class.

        Return a message when two validators begin to differ, else an empty string.
        """
        said = ""
        for other in others:
            key = (min(validator, other), max(validator, other))
            if key not in self._counts and len(self._counts) >= PAIRS_MAX:
                continue
            pair = self._counts.setdefault(key, {key[0]: VerdictCounts(), key[1]: VerdictCounts()})
            before = _differ(*pair.values())
            counts = pair[validator]
            counts.judged += 1
            counts.convicted += convicts
            counts.suspicious += is_suspicious
            if not before and (how := _differ(*pair.values())):
                said = f"validators {key[0]} and {key[1]} disagree more often than chance: {how}"
        return said

    def differing(self) -> list[dict[str, Any]]:
        """Return the row of each pair that differs, for the status."""
        return [
            {"validators": list(key), "how": how}
            for key, pair in self._counts.items()
            if (how := _differ(*pair.values()))
        ]


def _differ(first: VerdictCounts, second: VerdictCounts) -> str:
    """Describe how the shares of two validators differ; empty if chance explains it."""
    for name in ("convicted", "suspicious"):
        mine, theirs = getattr(first, name), getattr(second, name)
        apart = _log_beta(mine, first.judged - mine) + _log_beta(theirs, second.judged - theirs)
        together = _log_beta(mine + theirs, first.judged + second.judged - mine - theirs)
        if apart - together >= math.log(DIFFER_FACTOR):
            return f"{name} {mine} of {first.judged} and {theirs} of {second.judged}"
    return ""


def _log_beta(hits: int, misses: int) -> float:
    """Return the log of the probability of this sequence under a uniform prior on its share."""
    return math.lgamma(hits + 1) + math.lgamma(misses + 1) - math.lgamma(hits + misses + 2)
