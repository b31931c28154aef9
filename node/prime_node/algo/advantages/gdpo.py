"""GDPO (arXiv 2601.05242): several rewards of a rollout, each normalized within its group by itself, so that none drowns another.

    A_i = sum over k of w_k (r_ik - mean(r_k)) / (std(r_k) + eps)        then whitened over the batch

Equal to verl's `gdpo` (verl/trainer/ppo/core_algos.py at 018f23b5), except that a group of one gets 0. The key `reward` is the
validators' reward; the others are entries of the dict that a run's own reward function returns, graded again by the trainer. An
entry that a rollout lacks counts as 0.
"""

from __future__ import annotations

import math

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs
from prime_node.algo.advantages.normalized import normalized
from prime_protocol.errors import LocalError

VERDICT = "reward"
"""Key of the validators' reward."""


def gdpo(
    inputs: AdvantageInputs,
    *,
    gdpo_reward_keys: str = VERDICT,
    gdpo_reward_weights: str | None = None,
    eps: float = 1e-6,
) -> AdvantageOutputs:
    """Compute the weighted sum. Keys and weights have commas between them; without weights each is 1. Raises LocalError."""
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
