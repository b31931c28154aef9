"""Truncated importance sampling (verl's rollout correction): the weight between trainer and sampler is clamped.

loss = -clamp(w, weight_min, weight_max) * min(rho * A, clip(rho) * A)        rho = pi / pi_prox        w: correction.py
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_prox_ratio, share_of_tokens
from prime_node.algo.losses.correction import behavior_weight


def tis(
    inputs: LossInputs,
    *,
    weight_min: float = 0.0,
    weight_max: float = 2.0,
    level: str = "token",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> LossOutputs:
    """Compute the loss.

    `level`: token, sequence or geometric; `eps_low`, `eps_high`: how far rho may be below and above 1.
    """
    weight = behavior_weight(inputs, level)
    clamped = weight.clamp(weight_min, weight_max)
    surrogate = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    return LossOutputs(
        clamped * surrogate.loss,
        {**surrogate.metrics, "weight_mean": clamped, "weight_truncated_share": share_of_tokens(weight != clamped)},
    )
