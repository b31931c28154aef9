"""Reward minus the group's mean, divided by the group's standard deviation (GRPO, arXiv 2402.03300, section 4.1).

    A = (s - mean(s)) / (std(s) + eps)        std: `sample` (divided by G - 1), or `population` (by G)

verl, TRL, OpenRLHF and SkyRL use the sample's.

Groups of equal rewards, and of one, get exactly 0.
"""

from __future__ import annotations

import statistics

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs
from prime_protocol.errors import LocalError


def normalized(inputs: AdvantageInputs, *, eps: float = 1e-8, std: str = "sample") -> AdvantageOutputs:
    """Compute the normalized reward. `eps` keeps the divisor positive; `std` is sample or population. Raises LocalError."""
    if std not in ("sample", "population"):
        raise LocalError(f"advantage normalized: std {std!r}: expected sample or population")
    rewards = inputs.rewards
    if inputs.is_flat:
        return AdvantageOutputs([0.0] * len(rewards))
    mean = statistics.fmean(rewards)
    deviation = statistics.stdev(rewards) if std == "sample" else statistics.pstdev(rewards)
    return AdvantageOutputs([(reward - mean) / (deviation + eps) for reward in rewards])
