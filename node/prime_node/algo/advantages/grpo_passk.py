"""Pass@k (arXiv 2503.19595): only the best rollout of a group learns, by how much better it is than the second.

    A = (largest reward - second largest) / (std(s) + eps)        of the best rollout; 0 of the others
    norm_adv_by_std_in_grpo = false                               without the divisor, the sample's deviation

Equal to verl's `grpo_passk` (verl/trainer/ppo/core_algos.py at 018f23b5), except that a group of one gets 0, not an error.
"""

from __future__ import annotations

import statistics

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs


def grpo_passk(inputs: AdvantageInputs, *, eps: float = 1e-6, norm_adv_by_std_in_grpo: bool = True) -> AdvantageOutputs:
    """Compute the best rollout's distance to the second; 0 if two are equally good."""
    rewards = inputs.rewards
    if inputs.is_flat:
        return AdvantageOutputs([0.0] * len(rewards))
    second, best = sorted(rewards)[-2:]
    divisor = statistics.stdev(rewards) + eps if norm_adv_by_std_in_grpo else 1.0
    return AdvantageOutputs([(best - second) / divisor if reward == best else 0.0 for reward in rewards])
