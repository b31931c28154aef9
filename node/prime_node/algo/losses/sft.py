"""Supervised fine-tuning: the cross-entropy of the reference tokens, loss = -log pi. Advantages and samplers play no part."""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, masked_mean, masked_sum


def sft(inputs: LossInputs) -> LossOutputs:
    """Token-wise."""
    mask = inputs.loss_mask
    return LossOutputs(
        loss=masked_sum(-inputs.trainer_logprobs, mask),
        metrics={"cross_entropy": masked_mean(-inputs.trainer_logprobs, mask)},
    )
