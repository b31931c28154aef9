"""Advantages of one value a rollout, from the rewards s of its group. A group of equal rewards, or of one, gets exactly 0.

Those named as verl's are equal to its functions (verl/trainer/ppo/core_algos.py at 018f23b5), except for groups of one.
"""

from __future__ import annotations

import math
import statistics

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs
from prime_protocol.errors import LocalError

VERDICT = "reward"
"""Key of the validators' reward."""


def group_mean(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute s - mean(s), the default: no division by a standard deviation (Dr. GRPO, arXiv 2503.20783)."""
    rewards = inputs.rewards
    if inputs.is_flat:
        return AdvantageOutputs([0.0] * len(rewards))
    mean = sum(rewards) / len(rewards)
    return AdvantageOutputs([reward - mean for reward in rewards])


def leave_one_out(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute s_i minus the mean of the others (RLOO, arXiv 2402.14740), which is G / (G - 1) (s_i - mean(s)).

    The baseline does not depend on the rollout that it is compared with.
    """
    size = len(inputs.rollouts)
    factor = size / (size - 1) if size > 1 else 0.0
    return AdvantageOutputs([factor * advantage for advantage in group_mean(inputs).advantages])


def max_rl(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute (s - mean(s)) / mean(s) where the mean is positive, else s - mean(s): MaxRL (arXiv 2602.02710), as in prime-rl.

    Maximum likelihood of success: a prompt weighs by the inverse of its success rate.
    """
    mean = statistics.fmean(inputs.rewards) if inputs.rewards else 0.0
    return AdvantageOutputs([value / mean if mean > 0.0 else value for value in group_mean(inputs).advantages])


def normalized(inputs: AdvantageInputs, *, eps: float = 1e-8, std: str = "sample") -> AdvantageOutputs:
    """Compute (s - mean(s)) / (std(s) + eps): GRPO (arXiv 2402.03300, section 4.1). Raises LocalError.

    `std` is `sample` (divided by G - 1, as in verl, TRL, OpenRLHF and SkyRL) or `population` (by G).
    """
    if std not in ("sample", "population"):
        raise LocalError(f"advantage normalized: std {std!r}: expected sample or population")
    rewards = inputs.rewards
    if inputs.is_flat:
        return AdvantageOutputs([0.0] * len(rewards))
    mean = statistics.fmean(rewards)
    deviation = statistics.stdev(rewards) if std == "sample" else statistics.pstdev(rewards)
    return AdvantageOutputs([(reward - mean) / (deviation + eps) for reward in rewards])


def opo(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute s minus the mean of s weighted by the number of sampled tokens: OPO (arXiv 2505.23585), as in verl.

    That baseline minimises the gradient's variance approximately.
    """
    lengths = [rollout.completion_len for rollout in inputs.rollouts]
    if inputs.is_flat or not sum(lengths):
        return AdvantageOutputs([0.0] * len(lengths))
    baseline = sum(length * reward for length, reward in zip(lengths, inputs.rewards, strict=True)) / sum(lengths)
    return AdvantageOutputs([reward - baseline for reward in inputs.rewards])


def grpo_passk(inputs: AdvantageInputs, *, eps: float = 1e-6, norm_adv_by_std_in_grpo: bool = True) -> AdvantageOutputs:
    """Compute pass@k (arXiv 2503.19595), as in verl: only the best rollout learns, by how much better it is than the second.

    That distance is divided by the sample's deviation plus `eps`, unless `norm_adv_by_std_in_grpo` is false. It is 0 if two are
    equally good.
    """
    rewards = inputs.rewards
    if inputs.is_flat:
        return AdvantageOutputs([0.0] * len(rewards))
    second, best = sorted(rewards)[-2:]
    divisor = statistics.stdev(rewards) + eps if norm_adv_by_std_in_grpo else 1.0
    return AdvantageOutputs([(best - second) / divisor if reward == best else 0.0 for reward in rewards])


def reinforce_plus_plus(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Return the rewards, to be whitened over the batch: REINFORCE++ (arXiv 2501.03262).

    `reinforce_plus_plus_baseline` whitens `group_mean` in the same way. As in verl, except that a return does not end at the
    environment's tokens between two turns.
    """
    return AdvantageOutputs(inputs.rewards)


def gdpo(
    inputs: AdvantageInputs,
    *,
    gdpo_reward_keys: str = VERDICT,
    gdpo_reward_weights: str | None = None,
    eps: float = 1e-6,
) -> AdvantageOutputs:
    """Compute GDPO (arXiv 2601.05242): several rewards, each normalized within its group by itself, so that none drowns another.

    A_i = sum over k of w_k (r_ik - mean(r_k)) / (std(r_k) + eps), then whitened over the batch. The key `reward` is the
    validators' reward; the others are entries of the dict that a run's own reward function returns, graded again by the
    trainer. An entry that a rollout lacks counts as 0. Keys and weights have commas between them; without weights each is 1.
    Raises LocalError.
    """
    keys = part_names(gdpo_reward_keys)
    total = [0.0] * len(inputs.rollouts)
    for key, weight in zip(keys, _weights(gdpo_reward_weights, len(keys)), strict=True):
        rewards = inputs.rewards
        if key != VERDICT:
            rewards = tuple(rollout.reward_parts.get(key, 0.0) for rollout in inputs.rollouts)
        its = normalized(inputs.with_rewards(rewards), eps=eps).advantages
        total = [value + weight * more for value, more in zip(total, its, strict=True)]
    return AdvantageOutputs(total)


def part_names(keys: str) -> list[str]:
    """Return the keys of a list with commas. Raises LocalError if there is none."""
    found = [key.strip() for key in keys.split(",") if key.strip()]
    if not found:
        raise LocalError('advantage gdpo: gdpo_reward_keys names no reward; give "reward,format", for example')
    return found


def _weights(text: str | None, count: int) -> list[float]:
    if text is None:
        return [1.0] * count
    try:
        found = [float(part) for part in str(text).split(",")]
    except ValueError:
        found = []
    if len(found) != count or not all(map(math.isfinite, found)):
        raise LocalError(
            f"advantage gdpo: gdpo_reward_weights {text!r}: expected {count} numbers with commas between them"
        )
    return found
