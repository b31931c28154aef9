"""PPO's clipped surrogate (arXiv 1707.06347) against the sampler, with dual clip (arXiv 1912.09729).

    loss = -min(r * A, clip(r, 1 - eps_low, 1 + eps_high) * A)        r = pi / mu
    where A < 0: no more than -dual_clip * A

Without the dual clip a token with a negative advantage and a large ratio has an unbounded gradient.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, clipped_surrogate, log_ratio


def ppo_clip(
    inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = 3.0
) -> LossOutputs:
    """Compute the loss.

    `eps_low`, `eps_high`: how far r may be below and above 1. `dual_clip` is above 1, or None to disable it.
    """
    return clipped_surrogate(
        log_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )
