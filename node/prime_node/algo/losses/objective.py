"""The objective of a train step: for each sequence the loss of its training mode, aggregated over the batch.

Implements ports.train_backend.Loss. The backend calls it once a micro-batch with whole sequences, divides the result by
`denominator` of the global counts, and calls backward.

Invariant: the values on masked tokens, the order of the sequences and their split into micro-batches do not change loss
or gradient. Only the rounding of a sum in another order may differ.

The aggregation of the tokens' losses l is the one number that a step minimises:

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prime_node.algo.losses.base import (
    LossFunction,
    LossInputs,
    LossOutputs,
    from_proximal,
    needs_of,
    sequence_sum,
    share_of_tokens,
)
from prime_node.algo.losses.penalty import NO_PENALTY, Penalty
from prime_node.algo.losses.rollout_correction import NO_CORRECTION, RolloutCorrection
from prime_node.ports.train_backend import AggregationKind, LossNeed
from prime_node.ports.train_samples import TrainingMode
from prime_protocol.errors import LocalError

LOG_RATIO_ABS = "log_ratio_abs"
"""Metric of every objective: mean |log pi - log mu| over the sampled tokens, nats."""


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


@dataclass(frozen=True, slots=True)
class LossSum:
    """One micro-batch's contribution to the batch."""

    loss: Tensor
    """Scalar, to be divided by the objective's `denominator`."""
    metrics: Mapping[str, Tensor]
    """Metrics, [2] each, without a gradient: the sum over trainable tokens, and their number. Add them up, then divide."""


@dataclass(frozen=True, slots=True)
class BoundLoss:
    """A loss with its settings. Example: BoundLoss(aipo, {"delta": 4.0})."""

    function: LossFunction
    settings: Mapping[str, Any]
    per_sequence: bool = False
    """Whether it is called for each sequence separately, as custom losses are."""
    penalty: Penalty = NO_PENALTY
    correction: RolloutCorrection = NO_CORRECTION
    choose: Callable[..., set[int]] | None = None
    """(advantages, logprobs, log ratios, Random, **settings) -> the tokens that it treats differently."""

    @property
    def needs(self) -> frozenset[LossNeed]:
        """Return the optional inputs that the loss and its penalty use."""
        return needs_of(self.function) | self.penalty.needs

    def __call__(self, inputs: LossInputs, aggregation: Aggregation) -> LossSum:
        """Sum over the sequences of `inputs`, whose masked tokens are already zeroed."""
        if not self.per_sequence:
            return self._sum(inputs, aggregation)
        parts = [self._sum(sequence, aggregation) for sequence in _sequences(inputs) if sequence.loss_mask.any()]
        return added(parts, like=inputs.trainer_logprobs)

    def _sum(self, inputs: LossInputs, aggregation: Aggregation) -> LossSum:
        outputs = self._corrected(inputs) if self.correction.is_active else self.function(inputs, **self.settings)
        weights_N = aggregation.weights(inputs)
        is_sum = outputs.loss.dim() == 0  # of one sequence, whose trainable tokens all weigh the same
        loss = outputs.loss * weights_N.max() if is_sum else aggregation.sum(outputs.loss, inputs)
        metrics = dict(outputs.metrics)
        if self.penalty.needs:
            terms = self.penalty(inputs)
            loss = loss + aggregation.sum(terms.loss, inputs)
            metrics |= terms.metrics
        return LossSum(loss, {name: _tally(value.detach(), inputs.loss_mask) for name, value in metrics.items()})

    def _corrected(self, inputs: LossInputs) -> LossOutputs:
        outputs = self.function(from_proximal(inputs), **self.settings)
        if outputs.loss.dim() == 0:
            raise LocalError("rollout_is and rollout_rs need a loss of one value a token; this one returns a sum")
        weight = self.correction.weights(inputs)
        metrics = {"rollout_is_mean": weight, "rollout_rejected_share": share_of_tokens(weight == 0.0)}
        return LossOutputs(outputs.loss * weight, {**outputs.metrics, **metrics})


class Objective:
    """Losses by training mode. Example: Objective({TrainingMode.RL: BoundLoss(aipo, {})}, Aggregation())."""

    def __init__(self, losses: Mapping[TrainingMode, BoundLoss], aggregation: Aggregation) -> None:
        self._losses = losses
        self.aggregation = aggregation

    @property
    def needs(self) -> frozenset[LossNeed]:
        """Return the optional inputs that the losses use."""
        return frozenset().union(*(loss.needs for loss in self._losses.values()))

    def denominator(self, *, num_tokens: int, num_sequences: int) -> float:
        """Return the divisor of the whole batch's sum, as the aggregation defines it."""
        return self.aggregation.denominator(num_tokens=num_tokens, num_sequences=num_sequences)

    def choose(
        self, advantages: Sequence[float], logprobs: Sequence[float], log_ratios: Sequence[float], *, seed: int
    ) -> set[int]:
        """Return the places of the tokens that the loss of mode rl treats differently. Raises LocalError."""
        loss = self._losses[TrainingMode.RL]
        if loss.choose is None:
            raise LocalError('the loss asks for "selected", and only clip_cov and kl_cov choose tokens')
        return loss.choose(advantages, logprobs, log_ratios, Random(seed), **loss.settings)

    @property
    def normalizes_weights(self) -> bool:
        """Return whether mode rl divides its importance weights by their mean over the optimizer step."""
        return self._losses[TrainingMode.RL].correction.rollout_is_batch_normalize

    def mean_weight(
        self,
        proximal_N: npt.NDArray[np.float64],
        inference_N: npt.NDArray[np.float64],
        mask_N: npt.NDArray[np.bool_],
        lengths: Sequence[int],
    ) -> float:
        """Return that mean, from all logprobs of the optimizer step, sequence by sequence."""
        proximal, inference, mask = map(torch.from_numpy, (proximal_N, inference_N, mask_N))
        inputs = LossInputs(proximal, inference, torch.zeros_like(proximal), mask, lengths=tuple(lengths))
        return self._losses[TrainingMode.RL].correction.mean_weight(_zeroed(inputs))

    def __call__(self, inputs: LossInputs) -> LossSum:
        """Sum the losses of one micro-batch, each sequence by its mode's loss."""
        parts = [self._of_mode(mode, part) for mode, part in _by_mode(_zeroed(inputs))]
        return added(parts, like=inputs.trainer_logprobs)

    def _of_mode(self, mode: TrainingMode, inputs: LossInputs) -> LossSum:
        part = self._losses[mode](inputs, self.aggregation)
        if mode is TrainingMode.SFT:
            return part
        distance = (inputs.trainer_logprobs - inputs.inference_logprobs).detach().abs()
        return replace(part, metrics={**part.metrics, LOG_RATIO_ABS: _tally(distance, inputs.loss_mask)})


def added(parts: Sequence[LossSum], *, like: Tensor) -> LossSum:
    """Return the sum of several; of none, a zero through which backward passes."""
    metrics: dict[str, Tensor] = {}
    for part in parts:
        for name, tally in part.metrics.items():
            metrics[name] = metrics[name] + tally if name in metrics else tally
    if not parts:
        return LossSum(torch.where(torch.zeros_like(like, dtype=torch.bool), like, 0.0).sum(), metrics)
    return LossSum(torch.stack([part.loss for part in parts]).sum(), metrics)


def _tally(values: Tensor, mask: Tensor) -> Tensor:
    """Return [2] the sum over trainable tokens and their number; a scalar is the value of each token."""
    count = mask.sum().to(torch.float32)
    total = values * count if values.dim() == 0 else torch.where(mask, values.to(torch.float32), 0.0).sum()
    return torch.stack([total.to(torch.float32), count])


def _zeroed(inputs: LossInputs) -> LossInputs:
    """Zero masked tokens, without a gradient; elsewhere a probability of 0 gets a finite logarithm."""
    mask = inputs.loss_mask

    def zeroed(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return torch.where(mask if values.dim() == 1 else mask[:, None], values, 0.0)

    return replace(
        inputs,
        trainer_logprobs=torch.where(mask, inputs.trainer_logprobs, 0.0).clamp(min=_LOGPROB_MIN),
        inference_logprobs=torch.where(mask, inputs.inference_logprobs, 0.0).clamp(min=_LOGPROB_MIN),
        advantages=torch.where(mask, inputs.advantages, 0.0),
        loss_weights=zeroed(inputs.loss_weights),
        teacher_logprobs=zeroed(inputs.teacher_logprobs),
        prox_logprobs=zeroed(inputs.prox_logprobs),
        reference_logprobs=zeroed(inputs.reference_logprobs),
        entropy=zeroed(inputs.entropy),
        values=zeroed(inputs.values),
        top_logprobs=zeroed(inputs.top_logprobs),
        teacher_top_logprobs=zeroed(inputs.teacher_top_logprobs),
        selected=None if inputs.selected is None else inputs.selected & mask,
    )


_LOGPROB_MIN = -1e9
"""Logarithm used for a probability of 0: 0 * it is 0, and its square is finite in float32."""

_PER_TOKEN = tuple(field.name for field in fields(LossInputs) if field.name not in ("lengths", "modes"))


def _by_mode(inputs: LossInputs) -> Iterator[tuple[TrainingMode, LossInputs]]:
    """Iterate over the modes and their sequences, in order."""
    modes = inputs.modes or (TrainingMode.RL,)
    present = dict.fromkeys(modes)
    if len(present) == 1:
        yield modes[0], inputs
        return
    sequences = list(_sequences(inputs))
    for mode in present:
        chosen = [sequence for sequence, its in zip(sequences, modes, strict=True) if its is mode]
        yield mode, _joined(chosen)


def _sequences(inputs: LossInputs) -> Iterator[LossInputs]:
    """Iterate over single sequences."""
    if len(inputs.lengths) < 2:
        yield inputs
        return
    columns = [_split(getattr(inputs, name), inputs.lengths) for name in _PER_TOKEN]
    for length, *values in zip(inputs.lengths, *columns, strict=True):
        yield LossInputs(**dict(zip(_PER_TOKEN, values, strict=True)), lengths=(length,))


def _split(values: Tensor | None, lengths: Sequence[int]) -> Sequence[Tensor | None]:
    return [None] * len(lengths) if values is None else torch.split_with_sizes(values, list(lengths))


def _joined(sequences: Sequence[LossInputs]) -> LossInputs:
    columns = {name: [getattr(sequence, name) for sequence in sequences] for name in _PER_TOKEN}
    joined: dict[str, Any] = {
        name: None if column[0] is None else torch.cat(column) for name, column in columns.items()
    }
    return LossInputs(**joined, lengths=tuple(sequence.lengths[0] for sequence in sequences))
