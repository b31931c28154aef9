"""Reward minus the group's mean, divided by the group's standard deviation (GRPO, arXiv 2402.03300, section 4.1).

    A = (s - mean(s)) / (std(s) + eps)        std over the group as a whole (divided by G)

Groups of equal rewards, and of one, get exactly 0.
"""

from __future__ import annotations

import statistics

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs


def normalized(inputs: AdvantageInputs, *, eps: float = 1e-8) -> AdvantageOutputs:
    """Compute the normalized reward. `eps` keeps the divisor positive."""
    rewards = inputs.rewards
    if inputs.is_flat:
        return AdvantageOutputs([0.0] * len(rewards))
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return AdvantageOutputs([(reward - mean) / (deviation + eps) for reward in rewards])
