"""Supervised fine-tuning: the cross-entropy of the reference tokens, loss = -log pi.

Advantages and samplers are unused.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs


def sft(inputs: LossInputs) -> LossOutputs:
    """Compute the cross-entropy."""
    return LossOutputs(loss=-inputs.trainer_logprobs, metrics={"cross_entropy": -inputs.trainer_logprobs})
