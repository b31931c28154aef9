"""AIPO with the ratio as a constant weight, as its paper writes the gradient (arXiv 2505.24034).

    loss = -sg(min(r, delta)) * A * log pi        r = pi / mu

Below delta its gradient is `aipo`'s; above it a token still counts, delta times, where `aipo` drops it.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio, share_of_tokens


def aipo_stop_gradient(inputs: LossInputs, *, delta: float = 8.0) -> LossOutputs:
    """Compute the loss. `delta` is the largest weight of a token."""
    ratio = log_ratio(inputs).exp().detach()
    return LossOutputs(
        loss=-ratio.clamp(max=delta) * inputs.advantages * inputs.trainer_logprobs,
        metrics={"ratio_mean": ratio, "ratio_clipped_share": share_of_tokens(ratio > delta)},
    )
