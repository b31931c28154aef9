"""Masked importance sampling (verl's rollout correction; IcePop): tokens whose weight is out of bounds are masked.

    loss = -w * [weight_min <= w <= weight_max] * min(rho * A, clip(rho) * A)        rho = pi / pi_prox        w: correction.py

Masked tokens still count in the batch's mean.
"""

from __future__ import annotations

import torch

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_prox_ratio, share_of_tokens
from prime_node.algo.losses.correction import behavior_weight


def mis(
    inputs: LossInputs,
    *,
    weight_min: float = 0.5,
    weight_max: float = 5.0,
    level: str = "token",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> LossOutputs:
    """Compute the loss.

    `level`: token, sequence or geometric; `eps_low`, `eps_high`: how far rho may be below and above 1.
    """
    weight = behavior_weight(inputs, level)
    is_kept = (weight >= weight_min) & (weight <= weight_max)
    kept = torch.where(is_kept, weight, 0.0)
    surrogate = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    return LossOutputs(
        kept * surrogate.loss, {**surrogate.metrics, "weight_mean": kept, "masked_share": share_of_tokens(~is_kept)}
    )
