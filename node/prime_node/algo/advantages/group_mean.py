"""Reward minus the group's mean, without dividing by a standard deviation (Dr. GRPO, arXiv 2503.20783).

This is the default. A group of one has no baseline and gets 0. Rewards that are all equal give exactly 0, whatever the
rounding of their mean.
"""

from __future__ import annotations

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs


def group_mean(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute reward minus group mean; 0 for a group of equal rewards."""
    rewards = inputs.rewards
    if inputs.is_flat:
        return AdvantageOutputs([0.0] * len(rewards))
    mean = sum(rewards) / len(rewards)
    return AdvantageOutputs([reward - mean for reward in rewards])
