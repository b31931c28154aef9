"""Inputs of an advantage that differs between the tokens of a rollout: one group, with values that the trainer computed.

A rollout's tokens are those that the model sampled, in order, over all of its turns. Its reward counts at the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from prime_node.algo.advantages.base import AdvantageInputs


class TokenNeed(StrEnum):
    """Value that an advantage of tokens asks for, and that the trainer computes only then."""

    VALUES = "values"
    """The critic's value of the state before the token."""
    SCORE_NORMS = "score_norms"
    """1 - 2 pi + the sum of pi^2 over the vocabulary: the squared norm of the gradient of log pi by the logits."""
    GREEDY_REWARD = "greedy_reward"
    """The reward of one greedy completion of the group's prompt (AdvantageInputs.greedy_reward)."""


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """One group. Example: TokenInputs(AdvantageInputs((RolloutView(1.0),)), costs=((0.1, 0.2),))."""

    group: AdvantageInputs
    costs: Sequence[Sequence[float]]
    """What each token costs: the weighted divergence from the reference policy, or 0."""
    score_norms: Sequence[Sequence[float]] = ()
    values: Sequence[Sequence[float]] = ()

    def rewards(self, index: int) -> list[float]:
        """Return the reward of each token of a rollout; empty if it has no tokens."""
        found: list[float] = np.negative(self.costs[index]).tolist()
        if found:
            found[-1] += self.group.rewards[index]
        return found


TokenAdvantageFunction = Callable[..., Sequence[Sequence[float]]]
"""(TokenInputs, **settings) -> the advantage of each token of each rollout."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def token_needs(*names: str) -> Callable[[_Function], _Function]:
    """Return a decorator of a token advantage that uses these values, such as "score_norms"."""

    def mark(function: _Function) -> _Function:
        function.token_needs = frozenset(map(TokenNeed, names))  # type: ignore[attr-defined]  # any function has it then
        return function

    return mark


def discounted_sums(values: Sequence[float], gamma: float) -> list[float]:
    """Return at each place the sum of the values from there on, discounted: v_t + gamma v_(t+1) + gamma^2 v_(t+2) + ..."""
    if gamma == 1.0:
        backwards = np.array(values[::-1], np.float64)
        backwards[:1] += 0.0  # as the sum below begins: -0 becomes 0
        return np.add.accumulate(backwards)[::-1].tolist()  # type: ignore[no-any-return]
    sums = [*accumulate(values[::-1], lambda total, value: value + gamma * total, initial=0.0)]
    return sums[:0:-1]
