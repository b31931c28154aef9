"""AIPO (arXiv 2505.24034, the seed's default): the importance ratio is clipped from above only.

    loss = -min(r, delta) * A        r = pi / mu

Above delta the gradient is zero: a token that the policy already prefers far more than the sampler did teaches nothing more.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio, masked_mean, masked_sum


def aipo(inputs: LossInputs, *, delta: float = 8.0) -> LossOutputs:
    """Token-wise. `delta` is the largest importance ratio that counts."""
    mask = inputs.loss_mask
    ratio = log_ratio(inputs).exp()
    return LossOutputs(
        loss=masked_sum(-ratio.clamp(max=delta) * inputs.advantages, mask),
        metrics={
            "ratio_mean": masked_mean(ratio, mask),
            "ratio_clipped_share": masked_mean((ratio > delta).to(ratio.dtype), mask),
        },
    )
