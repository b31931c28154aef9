"""DPPO with a KL term, prime-rl's default since its version 0.4.

Tokens whose probability moved too far in the direction of their advantage are dropped. A squared log ratio holds all
tokens near the sampler.

    loss = -keep * adv_tau * A * min(r, delta) + kl_tau * log(r)^2        r = pi / mu
    keep = not (A > 0 and pi - mu > dppo_mask_high  or  A <= 0 and pi - mu < -dppo_mask_low)

The mask compares probabilities (total variation), not ratios: a rare token may change its ratio much, a frequent one
may not. The second term covers dropped tokens too. prime-rl's documents write min(r, delta), but its code has no delta:
None is the default. With `dppo_mask_by_sign` = false a token is dropped on either side whatever its advantage: IPO, prime-rl's
default before DPPO.
"""

from __future__ import annotations

import torch

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio, share_of_tokens


def dppo_kl(
    inputs: LossInputs,
    *,
    dppo_mask_low: float = 0.2,
    dppo_mask_high: float = 0.2,
    adv_tau: float = 1.0,
    kl_tau: float = 1e-3,
    delta: float | None = None,
    dppo_mask_by_sign: bool = True,
) -> LossOutputs:
    """Compute the loss.

    The mask's bounds are probabilities; the taus weigh the two terms; `delta` is the largest ratio that counts.
    """
    advantages = inputs.advantages
    log_r = log_ratio(inputs)
    ratio = log_r.exp()
    moved = inputs.trainer_logprobs.detach().exp() - inputs.inference_logprobs.exp()
    rose, fell = moved > dppo_mask_high, moved < -dppo_mask_low
    dropped = torch.where(advantages > 0.0, rose, fell) if dppo_mask_by_sign else rose | fell
    counted = ratio if delta is None else ratio.clamp(max=delta)
    policy_term = torch.where(dropped, 0.0, -adv_tau * advantages * counted)
    return LossOutputs(
        loss=policy_term + kl_tau * log_r.square(),
        metrics={"ratio_mean": ratio, "masked_share": share_of_tokens(dropped), "log_ratio_squared": log_r.square()},
    )
