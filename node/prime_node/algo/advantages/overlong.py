"""Soft penalty of long rollouts (DAPO, arXiv 2503.14476, equation 13), before any advantage.

    reward' = reward + min(0, (longest - len - length) / len * penalty_factor)

`longest` is the run's longest completion. Equal to verl's `overlong_buffer` (verl's reward manager `dapo`).
"""

from __future__ import annotations

from dataclasses import dataclass

from prime_node.algo.advantages.base import AdvantageInputs


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """The penalty's settings."""

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
