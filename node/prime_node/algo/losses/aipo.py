"""AIPO (arXiv 2505.24034), the default: the importance ratio is clipped from above only.

    loss = -min(r, delta) * A        r = pi / mu

Above delta the gradient is zero: a token that the policy already prefers far more than the sampler did is ignored.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio, share_of_tokens


def aipo(inputs: LossInputs, *, delta: float = 8.0) -> LossOutputs:
    """Compute the loss. `delta` is the largest importance ratio that counts."""
    ratio = log_ratio(inputs).exp()
    return LossOutputs(
        loss=-ratio.clamp(max=delta) * inputs.advantages,
        metrics={"ratio_mean": ratio, "ratio_clipped_share": share_of_tokens(ratio > delta)},
    )
