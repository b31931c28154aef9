"""Aggregation of the tokens' losses to the one number that a step minimises.

    token_mean        sum over tokens of l                    / trainable tokens of the batch
    sequence_mean     sum over sequences of mean over it of l / sequences of the batch
    constant_length   sum over tokens of l                    / (sequences of the batch * constant_length)    arXiv 2503.20783
    sequence_sum      sum over tokens of l                    / sequences of the batch
    token_sum         sum over tokens of l
    prompt_mean       sum over prompts of mean over all tokens of its sequences of l / prompts of the batch

`prompt_mean` is computed as token_mean with a factor for each sequence (TrainSample.loss_weight), and so is a division of each
training mode by its own count (DivisionKind). A sequence's tokens are its
trainable ones. All counts are of the whole batch, over all micro-batches and ranks. The first factor is summed per micro-batch,
the divisor is global, so no split of a batch changes loss or gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prime_node.algo.losses.base import LossInputs, sequence_sum
from prime_node.ports.train_backend import AggregationKind
from prime_protocol.errors import LocalError


@dataclass(frozen=True, slots=True)
class Aggregation:
    """An aggregation with its constant.

    Example: Aggregation(AggregationKind.CONSTANT_LENGTH, constant_length=4096). Raises LocalError without the length.
    """

    kind: AggregationKind = AggregationKind.TOKEN_MEAN
    constant_length: int | None = None
    """Tokens; for `constant_length` only."""

    def __post_init__(self) -> None:
        if self.kind is AggregationKind.CONSTANT_LENGTH and not self.constant_length:
            raise LocalError("loss aggregation constant_length: set trainer.loss.constant_length, in tokens")

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return [N] the factor of each token's loss before the sum; 0 on masked ones."""
        trained = inputs.loss_mask.to(inputs.trainer_logprobs.dtype)
        if inputs.loss_weights is not None:
            trained = trained * inputs.loss_weights
        if self.kind is not AggregationKind.SEQUENCE_MEAN:
            return trained
        tokens = sequence_sum(inputs.loss_mask.to(trained.dtype), inputs)
        return trained / tokens.clamp(min=1.0)

    def sum(self, loss_N: Tensor, inputs: LossInputs) -> Tensor:
        """Return the scalar sum, to be divided by `denominator`."""
        return (torch.where(inputs.loss_mask, loss_N, 0.0) * self.weights(inputs)).sum()

    def denominator(self, *, num_tokens: int, num_sequences: int) -> float:
        """Return the divisor for the whole batch, from its trainable tokens and its sequences with any. At least 1."""
        if self.kind in (AggregationKind.TOKEN_MEAN, AggregationKind.PROMPT_MEAN):
            return float(max(1, num_tokens))
        if self.kind is AggregationKind.TOKEN_SUM:
            return 1.0
        if self.kind in (AggregationKind.SEQUENCE_MEAN, AggregationKind.SEQUENCE_SUM):
            return float(max(1, num_sequences))
        assert self.constant_length is not None
        return float(max(1, num_sequences) * self.constant_length)
