"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): the trust region is around a policy newer than the sampler's.

    loss = -w * min(rho * A, clip(rho) * A)        rho = pi / pi_prox        w = pi_prox / mu, at most behavior_weight_max

pi_prox is the first policy of the sync cycle (verl: `compute_prox_log_prob`). If the trainer takes one optimizer step a
cycle, that is the policy it holds, nothing has to be computed, and rho is 1.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_prox_ratio, log_prox_weight
from prime_protocol.errors import LocalError


def decoupled_ppo(
    inputs: LossInputs,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    behavior_weight_max: float | None = None,
    behavior_weight_mode: str = "clamp",
) -> LossOutputs:
    """Compute the loss.

    `eps_low`, `eps_high`: how far rho may be below and above 1. `behavior_weight_max` bounds w from above;
    `behavior_weight_mode` says how: clamp, or mask, which drops the token (AReaL's default). Raises LocalError.
    """
    if behavior_weight_mode not in ("clamp", "mask"):
        raise LocalError(f"loss behavior_weight_mode {behavior_weight_mode!r}: expected clamp or mask")
    weight = log_prox_weight(inputs).exp()
    if behavior_weight_max is not None:
        is_mask = behavior_weight_mode == "mask"
        weight = weight * (weight <= behavior_weight_max) if is_mask else weight.clamp(max=behavior_weight_max)
    surrogate = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    return LossOutputs(weight * surrogate.loss, {**surrogate.metrics, "weight_mean": weight})
