"""Losses that clip an importance ratio as PPO does: loss = -min(x A, clip(x, 1 - eps_low, 1 + eps_high) A), of different x.

    r      pi / mu                                          against the sampler
    s      exp(mean over the sequence of log r)             one for a whole sequence
    rho    pi / pi_prox, after a constant weight w          against the weights at the start of the step, or of the sync cycle

In all of them `eps_low` and `eps_high` say how far x may be below and above 1.
"""

from __future__ import annotations

import torch

from prime_node.algo.losses.base import (
    LossInputs,
    LossOutputs,
    clipped_surrogate,
    log_prox_ratio,
    log_prox_weight,
    log_ratio,
    sequence_mean,
    share_of_tokens,
)
from prime_node.algo.losses.rollout_correction import behavior_weight
from prime_protocol.errors import LocalError


def ppo_clip(
    inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2, dual_clip: float | None = 3.0
) -> LossOutputs:
    """Compute PPO's loss (arXiv 1707.06347) of r with dual clip (arXiv 1912.09729): where A < 0, at most -dual_clip A.

    Without the dual clip a token with a negative advantage and a large ratio has an unbounded gradient. `dual_clip` is above 1,
    or None to disable it.
    """
    return clipped_surrogate(
        log_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high, dual_clip=dual_clip
    )


def dapo(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.28) -> LossOutputs:
    """Compute DAPO's loss (arXiv 2503.14476) of r, averaged over tokens, with a higher upper bound ("clip higher").

    Its dynamic sampling drops groups of equal rewards: filter `zero_advantage`, and the curriculum's online difficulty filtering.
    """
    return clipped_surrogate(log_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)


def dr_grpo(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutputs:
    """Compute Dr. GRPO's loss (arXiv 2503.20783) of r, to be summed over tokens and divided by a constant length.

    Dividing by each completion's own length would prefer short right answers and long wrong ones. The advantage is `group_mean`.
    """
    return clipped_surrogate(log_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)


def gspo(inputs: LossInputs, *, eps_low: float = 3e-4, eps_high: float = 4e-4) -> LossOutputs:
    """Compute GSPO's loss (arXiv 2507.18071) of s. Its aggregation is sequence_mean.

    The bounds (section 5.1) are far narrower than those of token-wise ratios: a mean of many moves little.
    """
    log_s = sequence_mean(log_ratio(inputs), inputs)
    return clipped_surrogate(log_s, inputs.advantages, eps_low=eps_low, eps_high=eps_high)


def grpo(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutputs:
    """Compute GRPO's loss (arXiv 2402.03300) of rho as in NeMo-RL.

    The sampler's logprobs are unused: if rollouts come from an older policy or another engine, the gradient is biased. `grpo_is`
    corrects that; this loss is the uncorrected baseline.
    """
    return clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)


def grpo_is(inputs: LossInputs, *, eps_low: float = 0.2, eps_high: float = 0.2) -> LossOutputs:
    """Compute the loss of rho times w = pi_prox / mu, NeMo-RL's `use_importance_sampling_correction`.

    With the weight the gradient equals that of rollouts of the trainer's own policy. `tis` and `mis` bound it.
    """
    return decoupled_ppo(inputs, eps_low=eps_low, eps_high=eps_high)


def decoupled_ppo(
    inputs: LossInputs,
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    behavior_weight_max: float | None = None,
    behavior_weight_mode: str = "clamp",
) -> LossOutputs:
    """Compute decoupled PPO's loss (arXiv 2110.00641; AReaL, arXiv 2505.24298) of rho times w = pi_prox / mu.

    pi_prox is the first policy of the sync cycle (verl: `compute_prox_log_prob`). If the trainer takes one optimizer step a
    cycle, that is the policy it holds, nothing has to be computed, and rho is 1. `behavior_weight_max` bounds w from above;
    `behavior_weight_mode` says how: clamp, or mask, which drops the token (AReaL's default). Raises LocalError.
    """
    if behavior_weight_mode not in ("clamp", "mask"):
        raise LocalError(f"loss behavior_weight_mode {behavior_weight_mode!r}: expected clamp or mask")
    weight = log_prox_weight(inputs).exp()
    if behavior_weight_max is not None:
        is_mask = behavior_weight_mode == "mask"
        weight = weight * (weight <= behavior_weight_max) if is_mask else weight.clamp(max=behavior_weight_max)
    surrogate = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    return LossOutputs(weight * surrogate.loss, {**surrogate.metrics, "weight_mean": weight})


def tis(
    inputs: LossInputs,
    *,
    weight_min: float = 0.0,
    weight_max: float = 2.0,
    level: str = "token",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> LossOutputs:
    """Compute the loss of rho times clamp(w, weight_min, weight_max): truncated importance sampling (verl's rollout correction).

    `level` of w (`behavior_weight`): token, sequence or geometric.
    """
    weight = behavior_weight(inputs, level)
    clamped = weight.clamp(weight_min, weight_max)
    surrogate = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    return LossOutputs(
        clamped * surrogate.loss,
        {**surrogate.metrics, "weight_mean": clamped, "weight_truncated_share": share_of_tokens(weight != clamped)},
    )


def mis(
    inputs: LossInputs,
    *,
    weight_min: float = 0.5,
    weight_max: float = 5.0,
    level: str = "token",
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> LossOutputs:
    """Compute the loss of rho times w [weight_min <= w <= weight_max]: masked importance sampling (verl; IcePop).

    Masked tokens still count in the batch's mean. `level` of w (`behavior_weight`): token, sequence or geometric.
    """
    weight = behavior_weight(inputs, level)
    is_kept = (weight >= weight_min) & (weight <= weight_max)
    kept = torch.where(is_kept, weight, 0.0)
    surrogate = clipped_surrogate(log_prox_ratio(inputs), inputs.advantages, eps_low=eps_low, eps_high=eps_high)
    return LossOutputs(
        kept * surrogate.loss, {**surrogate.metrics, "weight_mean": kept, "masked_share": share_of_tokens(~is_kept)}
    )
