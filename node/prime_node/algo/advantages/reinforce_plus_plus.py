"""REINFORCE++ (arXiv 2501.03262): rewards whitened over the whole batch instead of each group.

    reinforce_plus_plus             A_t = sum over u >= t of gamma^(u - t) r_u        r_u the reward of token u
    reinforce_plus_plus_baseline    A = s - mean(s) of the group

Both then become (A - mean) / sqrt(variance + 1e-8) over the trainable tokens of one optimizer step (batch_whitening.py). Without
a discount and a divergence in the reward, A_t is the rollout's reward s. Equal to verl's functions of these names
(verl/trainer/ppo/core_algos.py at 018f23b5), except that a group of one has the advantage 0 with a baseline, and that a return
does not end at the environment's tokens between two turns.
"""

from __future__ import annotations

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs
from prime_node.algo.advantages.token_base import TokenInputs, discounted_sums


def reinforce_plus_plus(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Return the rewards, to be whitened over the batch."""
    return AdvantageOutputs(inputs.rewards)


def reinforce_plus_plus_tokens(inputs: TokenInputs, *, gamma: float = 1.0) -> list[list[float]]:
    """Return the discounted return of each token. `gamma` is the discount for each token."""
    return [discounted_sums(inputs.rewards(index), gamma) for index in range(len(inputs.costs))]
