"""Length shaping of rewards, before any advantage: among a group's best rollouts the cheap ones get more (prime-rl).

    best      the rollouts whose reward is the group's highest, if that is above 0
    reward'   reward * (1 + clamp(1 - cost / mean cost of the best, 0, 1))        of the best; the others keep theirs

Only the best rollouts can earn the bonus, so a short wrong answer never gains. The cost is counted in tokens or in
turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from enum import StrEnum

from prime_node.algo.advantages.base import AdvantageInputs, RolloutView


class LengthCost(StrEnum):
    """Cost measure of a rollout."""

    TOKENS = "tokens"
    """completion_weight * tokens of the model + tool_response_weight * tokens of the environment."""
    TURNS = "turns"
    """Requests to the model."""


def shaped_rewards(inputs: AdvantageInputs, cost: LengthCost, weights: Mapping[str, float]) -> list[float]:
    """Return the shaped rewards. `weights` are those of LengthCost.TOKENS by name, 1 by default."""
    best = max(inputs.rewards, default=0.0)
    costs = [_cost(rollout, cost, weights) for rollout in inputs.rollouts]
    of_best = [its for its, reward in zip(costs, inputs.rewards, strict=True) if reward == best]
    mean_cost = statistics.fmean(of_best) if of_best else 0.0
    if best <= 0.0 or mean_cost <= 0.0:
        return list(inputs.rewards)
    return [
        reward * (1.0 + min(1.0, max(0.0, 1.0 - its / mean_cost))) if reward == best else reward
        for its, reward in zip(costs, inputs.rewards, strict=True)
    ]


def _cost(rollout: RolloutView, cost: LengthCost, weights: Mapping[str, float]) -> float:
    if cost is LengthCost.TURNS:
        return float(rollout.num_turns)
    completion_cost = weights.get("completion_weight", 1.0) * rollout.completion_len
    return completion_cost + weights.get("tool_response_weight", 1.0) * rollout.tool_response_len
