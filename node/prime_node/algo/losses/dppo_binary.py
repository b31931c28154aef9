"""DPPO (arXiv 2602.04879) as in verl: tokens that left the trust region in their advantage's direction are dropped.

    loss = -keep sg(min(r, clip_ratio_c)) A log pi        r = pi / mu
    keep = not (A > 0 and pi > mu and D > eps_high  or  A <= 0 and pi < mu and D > eps_low)

D compares the token with all others together. `dppo_binary_kl`: D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), each
1 - p raised by 1e-8; `dppo_binary_tv`: D = |pi - mu|. They are verl's `dppo_kl` and `dppo_tv` (verl/trainer/ppo/core_algos.py at
018f23b5). The loss `dppo_kl` here is prime-rl's: total variation, and a squared log ratio.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio, share_of_tokens

_TINY = 1e-8


def dppo_binary_kl(
    inputs: LossInputs, *, eps_low: float = 0.05, eps_high: float = 0.05, clip_ratio_c: float = 20.0
) -> LossOutputs:
    """Compute the loss with the divergence in nats. `clip_ratio_c` is the largest weight of a token."""
    pi, mu = _probabilities(inputs)
    log_mu_to_pi = inputs.inference_logprobs - inputs.trainer_logprobs.detach()
    divergence = mu * log_mu_to_pi + (1.0 - mu) * ((1.0 - mu + _TINY) / (1.0 - pi + _TINY)).log()
    return _within(inputs, divergence, eps_low, eps_high, clip_ratio_c)


def dppo_binary_tv(
    inputs: LossInputs, *, eps_low: float = 0.15, eps_high: float = 0.15, clip_ratio_c: float = 20.0
) -> LossOutputs:
    """Compute the loss with the difference of probabilities. `clip_ratio_c` is the largest weight of a token."""
    pi, mu = _probabilities(inputs)
    return _within(inputs, (pi - mu).abs(), eps_low, eps_high, clip_ratio_c)


def _probabilities(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    return inputs.trainer_logprobs.detach().exp().clamp(max=1.0), inputs.inference_logprobs.exp().clamp(max=1.0)


def _within(inputs: LossInputs, divergence: Tensor, low: float, high: float, ratio_max: float) -> LossOutputs:
    moved = (inputs.trainer_logprobs - inputs.inference_logprobs).detach()
    rose, fell = (divergence > high) & (moved > 0.0), (divergence > low) & (moved < 0.0)
    dropped = torch.where(inputs.advantages > 0.0, rose, fell)
    weight = torch.where(dropped, 0.0, log_ratio(inputs).exp().detach().clamp(max=ratio_max))
    return LossOutputs(
        loss=-weight * inputs.advantages * inputs.trainer_logprobs,
        metrics={"ratio_mean": weight, "masked_share": share_of_tokens(dropped)},
    )
