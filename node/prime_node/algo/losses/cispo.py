"""CISPO (MiniMax-M1, arXiv 2506.13585): the importance weight is clipped, no token's gradient is.

    loss = -sg(clip(r, 1 - eps_low, 1 + eps_high)) * A * log pi        r = pi / mu

PPO's clip drops exactly the rare tokens that change the direction of a chain of thought. Here they still count, with a
bounded weight.
"""

from __future__ import annotations

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio, share_of_tokens


def cispo(inputs: LossInputs, *, eps_low: float = 1.0, eps_high: float = 4.0) -> LossOutputs:
    """Compute the loss. `eps_low` of 1 leaves no lower bound, as in the paper; the weight is at most 1 + `eps_high`."""
    ratio = log_ratio(inputs).exp().detach()
    weight = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    return LossOutputs(
        loss=-weight * inputs.advantages * inputs.trainer_logprobs,
        metrics={"ratio_mean": ratio, "ratio_clipped_share": share_of_tokens(weight != ratio)},
    )
