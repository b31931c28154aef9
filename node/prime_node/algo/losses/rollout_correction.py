"""Correction of any loss for the difference between the sampler and the proximal policy, with verl's names and meanings.

    loss' = w * keep * loss with mu replaced by pi_prox        w = pi_prox / mu

So GSPO, CISPO, SAPO, GMPO and custom losses of one value a token get importance weights: their own ratio is then pi / pi_prox.

    rollout_is              token, sequence or geometric (CorrectionLevel)
    rollout_is_threshold    "5": w is at most 5 (TIS). "0.5_5": outside of the bounds it is 0 (IcePop). "inf": unbounded
    rollout_rs              rejection, several names with commas between them: token_k1, token_k2, token_k3, seq_sum_k1, ...,
                            seq_mean_k1, ..., seq_max_k2, seq_max_k3. k1 = -log w, k2 = log(w)^2 / 2, k3 = w - 1 - log w
    rollout_rs_threshold    for each name, or one for all: an upper bound of k2 or k3; for k1 bounds "lower_upper" of
                            exp(k1) = mu / pi_prox, of which "upper" alone means 1 / upper to upper

`rollout_is = "token"` with `rollout_rs = "seq_mean_k1"` is seq-mask-tis. A rejected token still counts in the batch's mean; in
verl it does not. Source: verl/trainer/ppo/rollout_corr_helper.py at 20c30bf8.

    rollout_is_batch_normalize    divides w, once it is bounded, by its mean over the optimizer step: over tokens at the level
                                  token, over sequences at the others. The rejection comes after it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from prime_node.algo.losses.base import (
    LOG_RATIO_MAX,
    LossInputs,
    log_prox_weight,
    sequence_max,
    sequence_mean,
    sequence_sum,
)
from prime_protocol.errors import LocalError

_SCOPES = {
    "token": ("k1", "k2", "k3"),
    "seq_sum": ("k1", "k2", "k3"),
    "seq_mean": ("k1", "k2", "k3"),
    "seq_max": ("k2", "k3"),
}
_CRITERIA = tuple(f"{scope}_{kind}" for scope, kinds in _SCOPES.items() for kind in kinds)


class CorrectionLevel(StrEnum):
    """Scope of one importance weight w."""

    TOKEN = "token"
    """pi_prox / mu of each token: little variance, some bias."""
    SEQUENCE = "sequence"
    """exp(sum of log(pi_prox / mu)), one for all tokens of a sequence: unbiased, large variance."""
    GEOMETRIC = "geometric"
    """exp(mean of log(pi_prox / mu)), one for all tokens of a sequence."""


def behavior_weight(inputs: LossInputs, level: str) -> Tensor:
    """Return [N] w, without a gradient. Raises LocalError for an unknown level."""
    log_weight = log_prox_weight(inputs)
    if level == CorrectionLevel.TOKEN:
        return log_weight.exp()
    if level == CorrectionLevel.SEQUENCE:
        return sequence_sum(log_weight, inputs).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    if level == CorrectionLevel.GEOMETRIC:
        return sequence_mean(log_weight, inputs).exp()
    raise LocalError(f"loss level {level!r}: expected one of {', '.join(CorrectionLevel)}")


@dataclass(frozen=True, slots=True)
class RolloutCorrection:
    """The correction's settings. Raises LocalError for a bad one."""

    rollout_is: str | None = None
    rollout_is_threshold: str = "2"
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None
    rollout_is_batch_normalize: bool = False

    def __post_init__(self) -> None:
        if self.rollout_is not in (None, *CorrectionLevel):
            raise LocalError(f"rollout_is {self.rollout_is!r}: expected one of {', '.join(CorrectionLevel)}")
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            raise LocalError("rollout_is_batch_normalize needs rollout_is: token, sequence or geometric")
        _bounds(self.rollout_is_threshold, "rollout_is_threshold")
        list(self._criteria())

    @property
    def is_active(self) -> bool:
        """Return whether it changes anything."""
        return self.rollout_is is not None or self.rollout_rs is not None

    def weights(self, inputs: LossInputs) -> Tensor:
        """Return [N] the weight of each token's loss, without a gradient; 0 where it is rejected."""
        weight = torch.ones_like(inputs.inference_logprobs)
        if self.rollout_is is not None:
            weight = self._bounded(inputs, self.rollout_is)
        if inputs.weight_means is not None:
            weight = weight / inputs.weight_means
        for scope, kind, lower, upper in self._criteria():
            log_weight = log_prox_weight(inputs)
            value = {"k1": -log_weight, "k2": 0.5 * log_weight**2, "k3": log_weight.exp() - 1.0 - log_weight}[kind]
            if scope != "token":
                value = {"seq_sum": sequence_sum, "seq_mean": sequence_mean, "seq_max": sequence_max}[scope](
                    value, inputs
                )
            weight = torch.where((value >= lower) & (value <= upper), weight, 0.0)
        return weight.detach()

    def mean_weight(self, inputs: LossInputs) -> float:
        """Return the mean of the bounded weights over the trainable tokens or their sequences; 1 if it is 0 or there are none."""
        assert self.rollout_is is not None, "__post_init__ refuses a mean of no weights"
        mask, weight = inputs.loss_mask, self._bounded(inputs, self.rollout_is)
        if self.rollout_is != CorrectionLevel.TOKEN:
            lengths_N = sequence_sum(mask.to(weight.dtype), inputs)
            shares = torch.where(mask, 1.0 / lengths_N.clamp(min=1.0), 0.0)  # they add up to the number of sequences
        else:
            shares = mask.to(weight.dtype)
        mean = float((torch.where(mask, weight, 0.0) * shares).sum() / shares.sum().clamp(min=1e-8))
        return mean if mean > 1e-8 else 1.0

    def _bounded(self, inputs: LossInputs, level: str) -> Tensor:
        lower, upper = _bounds(self.rollout_is_threshold, "rollout_is_threshold")
        weight = behavior_weight(inputs, level)
        is_inside = (weight >= (lower or 0.0)) & (weight <= upper)
        return weight.clamp(max=upper) if lower is None else torch.where(is_inside, weight, 0.0)

    def _criteria(self) -> list[tuple[str, str, float, float]]:
        """Return scope, estimator, lower and upper bound of each criterion of rejection."""
        names = [name.strip() for name in (self.rollout_rs or "").split(",") if name.strip()]
        given = [text.strip() for text in (self.rollout_rs_threshold or "").split(",") if text.strip()]
        if unknown := [name for name in names if name not in _CRITERIA]:
            raise LocalError(f"rollout_rs {unknown[0]!r}: expected some of {', '.join(_CRITERIA)}")
        if names and len(given) not in (1, len(names)):
            raise LocalError(f"rollout_rs_threshold: expected one bound, or one for each of {', '.join(names)}")
        found = []
        for name, text in zip(names, given * len(names) if len(given) == 1 else given, strict=False):
            (scope, kind), (lower, upper) = name.rsplit("_", 1), _bounds(text, "rollout_rs_threshold")
            if kind == "k1":
                found.append((scope, kind, math.log(1.0 / upper if lower is None else lower), math.log(upper)))
            elif lower is None:
                found.append((scope, kind, -math.inf, upper))
            else:
                raise LocalError(f"rollout_rs_threshold {text!r}: {name} has an upper bound only")
        return found


def _bounds(text: str, name: str) -> tuple[float | None, float]:
    """Return the lower bound, None if there is none, and the upper one. Raises LocalError."""
    try:
        numbers = [float(part) for part in str(text).split("_")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not 0.0 < numbers[0] <= numbers[-1]:
        raise LocalError(f'{name} {text!r}: expected an upper bound such as 2, or both such as "0.5_5"')
    return (numbers[0] if len(numbers) == 2 else None), numbers[-1]


NO_CORRECTION = RolloutCorrection()
