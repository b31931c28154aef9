"""Terms that are added to any loss of mode `rl`, a token at a time, and aggregated like it.

    loss + kl_loss_coef * KL(pi || reference) - entropy_coeff * H(pi)

The estimators of the divergence, with d = log pi - log reference (http://joschu.net/blog/kl-approx.html; names and bounds are
those of verl, verl/trainer/ppo/core_algos.py at 018f23b5, `kl_penalty`):

    k1, kl            d                               its gradient is 0 in expectation: of use in a reward
    k2, mse           d^2 / 2                         its gradient is the divergence's
    k3, low_var_kl    min(e^-d - 1 + d, 10)           never negative; -d is bounded by 20
    abs               |d|
    k1+, k3+, ...     the value of the name before the +, the gradient of k2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from prime_node.algo.losses.base import LOG_RATIO_MAX, LossInputs, LossOutputs
from prime_node.ports.train_backend import LossNeed
from prime_protocol.errors import LocalError

_KL_VALUE_MAX = 10.0
_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "k1": "k1", "k2": "k2", "k3": "k3", "abs": "abs"}


@dataclass(frozen=True, slots=True)
class Penalty:
    """The terms' settings. Raises LocalError for an unknown estimator."""

    kl_loss_coef: float = 0.0
    kl_loss_type: str = "k3"
    entropy_coeff: float = 0.0

    def __post_init__(self) -> None:
        known_estimator(self.kl_loss_type)

    @property
    def needs(self) -> frozenset[LossNeed]:
        """Return the inputs that the terms use."""
        reference = {LossNeed.REFERENCE_LOGPROBS} if self.kl_loss_coef else set()
        return frozenset(reference | ({LossNeed.ENTROPY} if self.entropy_coeff else set()))

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the terms and the divergence itself."""
        loss, metrics = torch.zeros_like(inputs.trainer_logprobs), {}
        if self.kl_loss_coef:
            assert inputs.reference_logprobs is not None, "the loss asked for them"
            divergence = kl_estimate(inputs.trainer_logprobs, inputs.reference_logprobs, self.kl_loss_type)
            loss, metrics = loss + self.kl_loss_coef * divergence, {"reference_kl": divergence}
        if self.entropy_coeff:
            assert inputs.entropy is not None, "the loss asked for it"
            loss = loss - self.entropy_coeff * inputs.entropy
        return LossOutputs(loss, metrics)


def known_estimator(name: str) -> str:
    """Return the short name of an estimator, without the +. Raises LocalError."""
    if name.removesuffix("+") not in _ESTIMATORS:
        raise LocalError(
            f"KL estimator {name!r}: expected one of {', '.join(_ESTIMATORS)}, or one of them with a + after it"
        )
    return _ESTIMATORS[name.removesuffix("+")]


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, name: str) -> Tensor:
    """Return [N] the estimate of KL(pi || reference) at each token. Raises LocalError for an unknown name."""
    kind, log_ratio_N = known_estimator(name), logprobs - reference_logprobs
    k2 = 0.5 * log_ratio_N.square()
    if kind == "k1":
        value = log_ratio_N
    elif kind == "k2":
        value = k2
    elif kind == "abs":
        value = log_ratio_N.abs()
    else:
        opposite = (-log_ratio_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        value = (opposite.exp() - opposite - 1.0).clamp(max=_KL_VALUE_MAX)
    return k2 + (value - k2).detach() if name.endswith("+") else value


def kl_values(logprobs: Sequence[float], reference_logprobs: Sequence[float], name: str) -> list[float]:
    """Return the same estimates of plain numbers, in float64."""
    ours, theirs = (torch.tensor(values, dtype=torch.float64) for values in (logprobs, reference_logprobs))
    return kl_estimate(ours, theirs, name).tolist()


NO_PENALTY = Penalty()
