"""ReMax (arXiv 2310.10505): the baseline is the reward of a greedy completion of the prompt.

    A_it = the rewards of rollout i from token t on, minus b        b: the reward at temperature 0, by the policy before the step

The trainer samples the greedy completion, because a lease assigns sampled ones only. Where it has none, b is the mean of the
group's rewards. Groups of equal rewards teach too. Equal to verl's `remax` (verl/trainer/ppo/core_algos.py at 018f23b5).
"""

from __future__ import annotations

import statistics

from prime_node.algo.advantages.token_base import TokenInputs, discounted_sums, token_needs


@token_needs("greedy_reward")
def remax(inputs: TokenInputs) -> list[list[float]]:
    """Return the advantage of each token."""
    baseline = inputs.group.greedy_reward
    if baseline is None:
        baseline = statistics.fmean(inputs.group.rewards) if inputs.group.rewards else 0.0
    returns = [discounted_sums(inputs.rewards(index), 1.0) for index in range(len(inputs.costs))]
    return [[value - baseline for value in its] for its in returns]
