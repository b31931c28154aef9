"""Inputs and outputs of a loss.

A loss gets one value for each completion token of one or of many sequences. It returns a loss for each token, which the
aggregation weighs and sums, or one scalar if called with one sequence. objective.py combines the two, and zeroes the values on
masked tokens before a loss sees them. So masked tokens contribute exactly nothing, whatever their values: 0 * inf is NaN
(prime-rl #2972), but `torch.where` selects.

Letters: N completion tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from prime_node.ports.train_backend import LossNeed
from prime_node.ports.train_samples import TrainingMode

LOG_RATIO_MAX = 20.0
"""Bound in nats. exp(20) is 5e8: beyond every clip and far below float32's overflow. Where the clamp acts, the gradient
is zero."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Per-token values of one sequence, or of many concatenated ones.

    Example: LossInputs(torch.tensor([-1.0]), torch.tensor([-1.1]), torch.tensor([0.5]), torch.tensor([True])).
    """

    trainer_logprobs: Tensor  # [N] nats, of the policy that is trained; carries the gradient
    inference_logprobs: Tensor  # [N] nats, of the policy that sampled (mu)
    advantages: Tensor  # [N]
    loss_mask: Tensor  # [N] bool, True where the token is trained
    teacher_logprobs: Tensor | None = None  # [N] nats, of a teacher, if the mode has one
    prox_logprobs: Tensor | None = None  # [N] nats, of the proximal policy; None: the weights at the start of the step
    reference_logprobs: Tensor | None = None  # [N] nats, of the reference policy, if the loss needs them
    entropy: Tensor | None = None  # [N] nats, of the trained policy, with its gradient, if the loss needs it
    top_logprobs: Tensor | None = (
        None  # [N, K] nats, of the trained policy, with its gradient, at the teacher's K tokens
    )
    teacher_top_logprobs: Tensor | None = None  # [N, K] nats, of the teacher at these; -inf where it has fewer
    values: Tensor | None = None  # [N] the critic's values before each token, if the loss needs them
    selected: Tensor | None = None  # [N] bool, tokens that the loss chose, if it needs them
    loss_weights: Tensor | None = None  # [N] factors of the aggregation
    weight_means: Tensor | None = None  # [N] mean importance weight of the optimizer step, at each token the same
    lengths: tuple[int, ...] = ()
    """Tokens of each sequence, masked ones included, in order; empty: one sequence."""
    modes: tuple[TrainingMode, ...] = ()
    """Mode of each sequence; empty: all `rl`."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """The loss and metrics: each [N], one value a token, or a scalar for a single sequence.

    Values on masked tokens are ignored. Metrics are averaged over trainable tokens and need no gradient.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]


LossFunction = Callable[..., LossOutputs]
"""(LossInputs, **settings) -> LossOutputs."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def needs(*names: str) -> Callable[[_Function], _Function]:
    """Return a decorator of a loss that uses these optional inputs, such as "entropy": they are computed for it alone."""

    def mark(function: _Function) -> _Function:
        function.needs = needs_of(function) | set(map(LossNeed, names))  # type: ignore[attr-defined]  # any function has it then
        return function

    return mark


def needs_of(function: Callable[..., Any]) -> frozenset[LossNeed]:
    """Return what a loss asked for with `needs`."""
    return frozenset(getattr(function, "needs", ()))


def from_proximal(inputs: LossInputs) -> LossInputs:
    """Return the inputs as if the proximal policy had sampled: r is rho, and w is 1."""
    return replace(inputs, inference_logprobs=_prox(inputs))


def log_ratio(inputs: LossInputs) -> Tensor:
    """Return [N] log r = log(pi / mu), clamped."""
    return _clamped(inputs.trainer_logprobs - inputs.inference_logprobs)


def log_prox_ratio(inputs: LossInputs) -> Tensor:
    """Return [N] log rho = log(pi / pi_prox), clamped. Without proximal logprobs it is 0 with the gradient of log pi."""
    return _clamped(inputs.trainer_logprobs - _prox(inputs))


def log_prox_weight(inputs: LossInputs) -> Tensor:
    """Return [N] log w = log(pi_prox / mu), clamped, without a gradient."""
    return _clamped(_prox(inputs) - inputs.inference_logprobs)


def clipped_surrogate(
    log_ratio_N: Tensor, advantages: Tensor, *, eps_low: float, eps_high: float, dual_clip: float | None = None
) -> LossOutputs:
    """Return [N] -min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A), PPO's loss (arXiv 1707.06347, equation 7).

    `dual_clip` c > 1: where A < 0, at most -c * A (arXiv 1912.09729, equation 5).
    """
    ratio = log_ratio_N.exp()
    clipped = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0.0, torch.minimum(loss, -dual_clip * advantages), loss)
    clips = torch.where(advantages > 0.0, ratio > 1.0 + eps_high, (advantages < 0.0) & (ratio < 1.0 - eps_low))
    return LossOutputs(loss, {"ratio_mean": ratio.detach(), "ratio_clipped_share": share_of_tokens(clips)})


def sequence_mean(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return [N] at each token its sequence's mean of `values` over trainable tokens; they must be 0 on masked ones."""
    return sequence_sum(values, inputs) / sequence_sum(inputs.loss_mask.to(values.dtype), inputs).clamp(min=1.0)


def sequence_sum(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return [N] at each token the sum of `values` over its sequence; they must be 0 on masked tokens."""
    sequence_of_N = sequence_ids(inputs)
    sums_S = values.new_zeros(max(1, len(inputs.lengths))).index_add(0, sequence_of_N, values)
    return sums_S[sequence_of_N]


def sequence_max(values: Tensor, inputs: LossInputs) -> Tensor:
    """Return [N] at each token the maximum over its sequence of `values`, which are not negative and 0 on masked tokens."""
    sequence_of_N = sequence_ids(inputs)
    largest_S = values.new_zeros(max(1, len(inputs.lengths))).scatter_reduce(0, sequence_of_N, values, "amax")
    return largest_S[sequence_of_N]


def sequence_ids(inputs: LossInputs) -> Tensor:
    """Return [N] the index of each token's sequence."""
    mask = inputs.loss_mask
    if not inputs.lengths:
        return torch.zeros(mask.shape, dtype=torch.int64, device=mask.device)
    lengths_S = torch.tensor(inputs.lengths, device=mask.device)
    return torch.arange(len(inputs.lengths), device=mask.device).repeat_interleave(lengths_S, output_size=len(mask))


def share_of_tokens(flags: Tensor) -> Tensor:
    """Return a metric whose mean is the share of flagged tokens."""
    return flags.to(torch.float32)


def _prox(inputs: LossInputs) -> Tensor:
    return inputs.trainer_logprobs.detach() if inputs.prox_logprobs is None else inputs.prox_logprobs


def _clamped(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
