"""GPG (arXiv 2504.02546), which is REINFORCE: loss = -A log pi. No ratio corrects for an older sampler; `rollout_is` can.

Equal to verl's `gpg` (verl/trainer/ppo/core_algos.py at 018f23b5).
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs


def gpg(inputs: LossInputs) -> LossOutputs:
    """Compute the loss."""
    return LossOutputs(-inputs.advantages * inputs.trainer_logprobs, {})
