"""OPO (arXiv 2505.23585): the group's mean reward weighted by length, which minimises the gradient's variance approximately.

    A_i = s_i - sum over j of length_j s_j / sum over j of length_j

Equal to verl's `opo` (verl/trainer/ppo/core_algos.py at 018f23b5). Groups of equal rewards, and of one, get exactly 0.
"""

from __future__ import annotations

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs


def opo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute reward minus the mean weighted by the number of sampled tokens."""
    lengths = [rollout.completion_len for rollout in inputs.rollouts]
    if inputs.is_flat or not sum(lengths):
        return AdvantageOutputs([0.0] * len(lengths))
    baseline = sum(length * reward for length, reward in zip(lengths, inputs.rewards, strict=True)) / sum(lengths)
    return AdvantageOutputs([reward - baseline for reward in inputs.rewards])
