"""Advantages that may differ between the tokens of a rollout, and their inputs: one group, with values that the trainer computed.

A rollout's tokens are those that the model sampled, in order, over all of its turns. Its reward counts at the last of them.
Tokens of the environment between two turns are skipped. Functions named as verl's are equal to its
(verl/trainer/ppo/core_algos.py at 018f23b5).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

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


def reinforce_plus_plus_tokens(inputs: TokenInputs, *, gamma: float = 1.0) -> list[list[float]]:
    """Return the discounted return of each token, to be whitened: REINFORCE++. `gamma` is the discount for each token."""
    return [discounted_sums(inputs.rewards(index), gamma) for index in range(len(inputs.costs))]


@token_needs("values")
def gae(inputs: TokenInputs, *, gamma: float = 1.0, lam: float = 1.0) -> list[list[float]]:
    """Return generalized advantage estimates (arXiv 1506.02438) with a critic's values V of the states before each token.

    delta_t = r_t + gamma V_(t+1) - V_t, where V after the last token is 0. A_t = delta_t + gamma lam A_(t+1), whitened later over
    the tokens of the optimizer step. A_t + V_t before the whitening is what the critic learns.
    """
    found = []
    for index, values in enumerate(inputs.values):
        now_T = np.array(values, np.float64)
        deltas_T = np.array(inputs.rewards(index)) + gamma * np.append(now_T[1:], 0.0)[: len(now_T)] - now_T
        found.append(discounted_sums(deltas_T.tolist(), gamma * lam))
    return found


@token_needs("greedy_reward")
def remax(inputs: TokenInputs) -> list[list[float]]:
    """Return the returns minus the reward of a greedy completion of the prompt: ReMax (arXiv 2310.10505), as in verl.

    The trainer samples the greedy completion by the policy before the step, because a lease assigns sampled ones only. Where it
    has none, the mean of the group's rewards replaces it. Groups of equal rewards teach too.
    """
    baseline = inputs.group.greedy_reward
    if baseline is None:
        baseline = statistics.fmean(inputs.group.rewards) if inputs.group.rewards else 0.0
    returns = [discounted_sums(inputs.rewards(index), 1.0) for index in range(len(inputs.costs))]
    return [[value - baseline for value in its] for its in returns]


@token_needs("score_norms")
def optimal_token_baseline(
    inputs: TokenInputs, *, handle_zero_tail: bool = True, epsilon: float = 1e-8
) -> list[list[float]]:
    """Return the returns minus, for each place in a group's rollouts, the baseline of least variance (verl).

    A_it = G_it - B_t        G_it: the rewards of rollout i from token t on
    B_t  = sum over i of G_it W_it / (sum over i of W_it + epsilon)        over the rollouts with a token t
    W_it = sum over u <= t of (1 - 2 pi_iu + sum over the vocabulary of pi^2)        the squared norm of the scores so far

    With `handle_zero_tail` the tokens of the longest rollout beyond the second longest have the baseline 0. Equal to verl's
    `tir_optimal_token_baseline`, and for one turn to `optimal_token_baseline`, except that groups of one, and of equal rewards
    without costs, get exactly 0, and that no importance weight scales W.
    """
    returns = [discounted_sums(inputs.rewards(index), 1.0) for index in range(len(inputs.costs))]
    lengths = sorted(map(len, returns))
    is_flat = inputs.group.is_flat and not any(any(costs) for costs in inputs.costs)
    if is_flat or sum(length > 0 for length in lengths) < 2:
        return [[0.0] * len(its) for its in returns]
    returns_GT, weights_GT = (
        _padded(returns),
        _padded([np.add.accumulate(norms).tolist() for norms in inputs.score_norms]),
    )
    baselines_T = (returns_GT * weights_GT).sum(axis=0) / (weights_GT.sum(axis=0) + epsilon)
    if handle_zero_tail:
        baselines_T[lengths[-2] :] = 0.0
    return [
        (its_T[: len(its)] - baselines_T[: len(its)]).tolist() for its_T, its in zip(returns_GT, returns, strict=True)
    ]


def _padded(rows: Sequence[Sequence[float]]) -> npt.NDArray[np.float64]:
    """Return the rows with zeros after them."""
    padded_GT = np.zeros((len(rows), max(map(len, rows))))
    for row_T, row in zip(padded_GT, rows, strict=True):
        row_T[: len(row)] = row
    return padded_GT
