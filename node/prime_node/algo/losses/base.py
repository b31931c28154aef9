"""What a loss takes and gives.

A loss sums over trainable tokens; the backend divides by the whole batch's count of them, over all micro-batches and ranks,
so that no split of a batch changes the gradient. Masked tokens contribute exactly nothing, whatever their values are:
`torch.where` chooses, because 0 * inf is NaN (prime-rl #2972).

Letters: N completion tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0
"""Nats. exp(20) is 5e8: beyond every clip and far below float32's overflow. Where the clamp acts, the gradient is zero."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Per-token values of one sequence, or of many one after another for a loss that is token-wise.

    Example: LossInputs(torch.tensor([-1.0]), torch.tensor([-1.1]), torch.tensor([0.5]), torch.tensor([True])).
    """

    trainer_logprobs: Tensor  # [N] nats, of the policy that is trained; carries the gradient
    inference_logprobs: Tensor  # [N] nats, of the policy that sampled
    advantages: Tensor  # [N]
    loss_mask: Tensor  # [N] bool, True where the token is trained
    teacher_logprobs: Tensor | None = None  # [N] nats, of a teacher, where the mode has one


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """A scalar to minimise, summed over trainable tokens, and numbers to log: means over trainable tokens, detached."""

    loss: Tensor
    metrics: Mapping[str, Tensor]


LossFunction = Callable[..., LossOutputs]
"""(LossInputs, **settings) -> LossOutputs."""


class BoundLoss:
    """A loss with its settings. Example: BoundLoss(aipo, token_wise=True, delta=4.0)."""

    def __init__(self, function: LossFunction, *, token_wise: bool, **settings: Any) -> None:
        self._call = partial(function, **settings)
        self._token_wise = token_wise

    @property
    def token_wise(self) -> bool:
        return self._token_wise

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        return self._call(inputs)


def log_ratio(inputs: LossInputs) -> Tensor:
    """log(pi / mu) of each token, clamped; 0 where masked, without a gradient."""
    difference = inputs.trainer_logprobs - inputs.inference_logprobs
    return torch.where(inputs.loss_mask, difference, 0.0).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum()


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over trainable tokens, detached; 0 where there are none."""
    return masked_sum(values.detach(), mask) / mask.sum().clamp(min=1)
