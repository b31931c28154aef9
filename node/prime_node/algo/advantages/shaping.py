"""Shaping of rewards by length, before any advantage: `OverlongPenalty`, and two ways of prime-rl.

tokens, turns: among a group's best rollouts the cheap ones get more (prime-rl until June 2026).

    best      the rollouts whose reward is the group's highest, if that is above 0
    reward'   reward * (1 + clamp(1 - cost / mean cost of the best, 0, 1))        of the best; the others keep theirs

Only the best rollouts can earn the bonus, so a short wrong answer never gains. The cost is counted in tokens or in
turns.

linear: every rollout loses by its length, in proportion to the group's success (prime-rl since then).

    reward'   reward - mean reward * sum over output tokens, input tokens and turns of weight * count / the group's largest
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from prime_node.algo.advantages.base import AdvantageInputs, RolloutView


class LengthCost(StrEnum):
    """Cost measure of a rollout."""

    TOKENS = "tokens"
    """completion_weight * tokens of the model + tool_response_weight * tokens of the environment."""
    TURNS = "turns"
    """Requests to the model."""
    LINEAR = "linear"
    """Sum of the model's tokens, the other tokens and the turns, each relative to the group's largest."""


_LINEAR_WEIGHTS = {"num_output_tokens_weight": 0.25, "num_input_tokens_weight": 0.1, "num_turns_weight": 0.1}
"""prime-rl's defaults."""


def shaped_rewards(inputs: AdvantageInputs, cost: LengthCost, weights: Mapping[str, float]) -> list[float]:
    """Return the shaped rewards. `weights` by name: those of LengthCost.TOKENS, 1 by default, or of LengthCost.LINEAR."""
    if cost is LengthCost.LINEAR:
        return _linearly(inputs, weights)
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


def _linearly(inputs: AdvantageInputs, weights: Mapping[str, float]) -> list[float]:
    if not inputs.rollouts:
        return []
    rollouts, mean = inputs.rollouts, statistics.fmean(inputs.rewards)
    counts = {
        "num_output_tokens_weight": [rollout.completion_len for rollout in rollouts],
        "num_input_tokens_weight": [len(rollout.prompt_ids) + rollout.tool_response_len for rollout in rollouts],
        "num_turns_weight": [rollout.num_turns for rollout in rollouts],
    }
    penalties = [
        [weights.get(name, _LINEAR_WEIGHTS[name]) * count / max(1, *its) for count in its]
        for name, its in counts.items()
    ]
    return [reward - mean * sum(shares) for reward, *shares in zip(inputs.rewards, *penalties, strict=True)]


def _cost(rollout: RolloutView, cost: LengthCost, weights: Mapping[str, float]) -> float:
    if cost is LengthCost.TURNS:
        return float(rollout.num_turns)
    completion_cost = weights.get("completion_weight", 1.0) * rollout.completion_len
    return completion_cost + weights.get("tool_response_weight", 1.0) * rollout.tool_response_len


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """Soft penalty of long rollouts (DAPO, arXiv 2503.14476, equation 13), equal to verl's `overlong_buffer`.

    reward' = reward + min(0, (longest - buffer - length) / buffer * penalty_factor)
    """

    buffer_tokens: int
    """Tokens before the longest length in which the penalty rises from 0 to its factor."""
    penalty_factor: float
    longest_tokens: int

    def shaped(self, inputs: AdvantageInputs) -> AdvantageInputs:
        """Return the group with the penalty in its rewards."""
        free = self.longest_tokens - self.buffer_tokens
        return inputs.with_rewards(
            [
                rollout.reward + min(0.0, (free - rollout.completion_len) / self.buffer_tokens * self.penalty_factor)
                for rollout in inputs.rollouts
            ]
        )
