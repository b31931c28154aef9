"""Losses that weigh the gradient of log pi by a bounded ratio r = pi / mu, by a gate of it, or by nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from prime_node.algo.losses.base import LossInputs, LossOutputs, log_ratio, sequence_mean, share_of_tokens

_TINY = 1e-8


def aipo(inputs: LossInputs, *, delta: float = 8.0) -> LossOutputs:
    """Compute AIPO's loss (arXiv 2505.24034), the default: -min(r, delta) A.

    Above delta the gradient is zero: a token that the policy already prefers far more than the sampler did is ignored.
    """
    ratio = log_ratio(inputs).exp()
    return LossOutputs(
        loss=-ratio.clamp(max=delta) * inputs.advantages,
        metrics={"ratio_mean": ratio, "ratio_clipped_share": share_of_tokens(ratio > delta)},
    )


def aipo_stop_gradient(inputs: LossInputs, *, delta: float = 8.0) -> LossOutputs:
    """Compute AIPO's loss as its paper writes the gradient: -sg(min(r, delta)) A log pi.

    Below delta its gradient is `aipo`'s; above it a token still counts, delta times, where `aipo` drops it.
    """
    ratio = log_ratio(inputs).exp().detach()
    return LossOutputs(
        loss=-ratio.clamp(max=delta) * inputs.advantages * inputs.trainer_logprobs,
        metrics={"ratio_mean": ratio, "ratio_clipped_share": share_of_tokens(ratio > delta)},
    )


def cispo(inputs: LossInputs, *, eps_low: float = 1.0, eps_high: float = 4.0) -> LossOutputs:
    """Compute CISPO's loss (MiniMax-M1, arXiv 2506.13585): -sg(clip(r, 1 - eps_low, 1 + eps_high)) A log pi.

    PPO's clip drops exactly the rare tokens that change the direction of a chain of thought. Here they still count, with a
    bounded weight. `eps_low` of 1 leaves no lower bound, as in the paper; the weight is at most 1 + `eps_high`.
    """
    ratio = log_ratio(inputs).exp().detach()
    weight = ratio.clamp(1.0 - eps_low, 1.0 + eps_high)
    return LossOutputs(
        loss=-weight * inputs.advantages * inputs.trainer_logprobs,
        metrics={"ratio_mean": ratio, "ratio_clipped_share": share_of_tokens(weight != ratio)},
    )


def sapo(inputs: LossInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> LossOutputs:
    """Compute SAPO's loss (arXiv 2511.20347): -(4 / tau) sigmoid(tau (r - 1)) A, a smooth gate in place of the clip.

    tau is `tau_pos` where A > 0, else `tau_neg`, which is narrower. At r = 1 value and gradient are 2 / tau A and those of -r A.
    Equal to verl's `sapo` (verl/trainer/ppo/core_algos.py at 018f23b5).
    """
    ratio = log_ratio(inputs).exp()
    tau = torch.where(inputs.advantages > 0.0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return LossOutputs(-gate * inputs.advantages, {"ratio_mean": ratio})


def gmpo(inputs: LossInputs, *, eps_low: float = 0.4, eps_high: float = 0.4) -> LossOutputs:
    """Compute GMPO's loss (arXiv 2507.20673): -A exp(mean over the sequence of c), each token's ratio clipped by itself.

    c is log r, bounded as PPO bounds r: above by `eps_high` where A > 0, below by -`eps_low` where A < 0. Its aggregation is
    sequence_mean. Equal to verl's `geo_mean` (verl/trainer/ppo/core_algos.py at 018f23b5).
    """
    log_r, advantages = log_ratio(inputs), inputs.advantages
    bounded = torch.where(advantages > 0.0, log_r.clamp(max=eps_high), log_r.clamp(min=-eps_low))
    ratio = sequence_mean(bounded, inputs).exp()
    return LossOutputs(
        loss=-ratio * advantages,
        metrics={"ratio_mean": ratio, "ratio_clipped_share": share_of_tokens(bounded != log_r)},
    )


def gpg(inputs: LossInputs) -> LossOutputs:
    """Compute GPG's loss (arXiv 2504.02546), which is REINFORCE: -A log pi. `rollout_is` can correct for an older sampler.

    Equal to verl's `gpg` (verl/trainer/ppo/core_algos.py at 018f23b5).
    """
    return LossOutputs(-inputs.advantages * inputs.trainer_logprobs, {})


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
    """Compute -keep adv_tau A min(r, delta) + kl_tau log(r)^2: DPPO with a KL term, prime-rl's default since its version 0.4.

    keep = not (A > 0 and pi - mu > dppo_mask_high  or  A <= 0 and pi - mu < -dppo_mask_low). The mask compares probabilities
    (total variation), not ratios: a rare token may change its ratio much, a frequent one may not. The second term covers dropped
    tokens too. prime-rl's documents write min(r, delta), but its code has no delta: None is the default. With `dppo_mask_by_sign`
    = false a token is dropped on either side whatever its advantage: IPO, prime-rl's default before DPPO.
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


def dppo_binary_kl(
    inputs: LossInputs, *, eps_low: float = 0.05, eps_high: float = 0.05, clip_ratio_c: float = 20.0
) -> LossOutputs:
    """Compute DPPO's loss (arXiv 2602.04879) as in verl: -keep sg(min(r, clip_ratio_c)) A log pi.

    keep = not (A > 0 and pi > mu and D > eps_high  or  A <= 0 and pi < mu and D > eps_low): tokens that left the trust region in
    their advantage's direction are dropped. D compares the token with all others together. Here, in nats,
    D = mu log(mu / pi) + (1 - mu) log((1 - mu) / (1 - pi)), each 1 - p raised by 1e-8. It is verl's `dppo_kl`, and the next one
    verl's `dppo_tv` (verl/trainer/ppo/core_algos.py at 018f23b5).
    """
    pi, mu = _probabilities(inputs)
    log_mu_to_pi = inputs.inference_logprobs - inputs.trainer_logprobs.detach()
    divergence = mu * log_mu_to_pi + (1.0 - mu) * ((1.0 - mu + _TINY) / (1.0 - pi + _TINY)).log()
    return _within(inputs, divergence, eps_low, eps_high, clip_ratio_c)


def dppo_binary_tv(
    inputs: LossInputs, *, eps_low: float = 0.15, eps_high: float = 0.15, clip_ratio_c: float = 20.0
) -> LossOutputs:
    """Compute the same with D = |pi - mu|. `clip_ratio_c` is the largest weight of a token."""
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
