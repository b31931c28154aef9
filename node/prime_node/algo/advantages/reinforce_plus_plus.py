"""REINFORCE++ (arXiv 2501.03262): rewards whitened over the whole batch instead of each group.

    reinforce_plus_plus             A = s
    reinforce_plus_plus_baseline    A = s - mean(s) of the group

Both then become (A - mean) / sqrt(variance + 1e-8) over the trainable tokens of one optimizer step (batch_whitening.py).
Equal to verl's functions of these names (verl/trainer/ppo/core_algos.py at 018f23b5) with gamma = 1, except that a group of one
has the advantage 0 with a baseline.
"""

from __future__ import annotations

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs


def reinforce_plus_plus(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Return the rewards, to be whitened over the batch."""
    return AdvantageOutputs(inputs.rewards)
