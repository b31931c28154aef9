"""Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298): the trust region is around a policy newer than the sampler's.

    loss = -w * min(rho * A, clip(rho) * A)        rho = pi / pi_prox        w = min(pi_prox / mu, behavior_weight_max)

pi_prox is the first policy of the sync cycle (verl: `compute_prox_log_prob`). If the trainer takes one optimizer step a
cycle, that is the policy it holds, nothing has to be computed, and rho is 1.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_prox_ratio, log_prox_weight


def decoupled_ppo(
    inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2, behavior_weight_max: float | None = None
) -> LossOutputs:
    """Compute the loss.

    `eps_low`, `eps_high`: how far rho may be below and above 1. `behavior_weight_max` bounds w from above.
    """
    weight = log_prox_weight(inputs).exp()
    if behavior_weight_max is not None:
        weight = weight.clamp(max=behavior_weight_max)
    surrogate = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    return LossOutputs(weight * surrogate.loss, {**surrogate.metrics, "weight_mean": weight})
