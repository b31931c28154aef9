"""Dr. GRPO (arXiv 2503.20783): PPO's surrogate, summed over tokens and divided by a constant length.

    loss = -min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A)        r = pi / mu        A = reward - mean of the group

Dividing by each completion's own length would prefer short right answers and long wrong ones. The advantage is
`group_mean`.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_ratio


def dr_grpo(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutputs:
    """Compute the loss. `eps_low`, `eps_high`: how far r may be below and above 1. Its aggregation is constant_length."""
    return clipped_surrogate(log_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
