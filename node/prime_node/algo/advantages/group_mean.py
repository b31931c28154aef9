"""Reward minus the group's mean, without dividing by a standard deviation (Dr. GRPO, arXiv 2503.20783; the seed's default).

A group of one has no baseline and gets 0. Rewards that are all equal give exactly 0, whatever rounding does to their mean.
"""

from __future__ import annotations

from prime_node.algo.advantages.base import AdvantageInputs


def group_mean(inputs: AdvantageInputs) -> list[float]:
    rewards = inputs.rewards
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]
