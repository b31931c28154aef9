"""GRPO with importance-sampling correction, NeMo-RL's `use_importance_sampling_correction`.

    loss = -w * min(rho * A, clip(rho) * A)        rho = pi / pi_prox        w = pi_prox / mu

w is a constant: with it the gradient equals that of rollouts of the trainer's own policy. `tis` and `mis` bound it.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_prox_ratio, log_prox_weight


def grpo_is(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutputs:
    """Compute the loss. `eps_low`, `eps_high`: how far rho may be below and above 1."""
    weight = log_prox_weight(inputs).exp()
    surrogate = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    return LossOutputs(weight * surrogate.loss, {**surrogate.metrics, "weight_mean": weight})
