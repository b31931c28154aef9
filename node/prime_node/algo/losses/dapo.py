"""DAPO (arXiv 2503.14476): PPO's surrogate with a higher upper bound ("clip higher"), averaged over tokens.

    loss = -min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A)        r = pi / mu        eps_high > eps_low

Its dynamic sampling drops groups of equal rewards: filter `zero_advantage`, and the curriculum's online difficulty filtering.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_ratio


def dapo(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.28) -> LossOutputs:
    """Compute the loss. `eps_low`, `eps_high`: how far r may be below and above 1."""
    return clipped_surrogate(log_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
