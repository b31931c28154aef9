"""Optimal token baseline: for each place in a group's rollouts the baseline of least variance (verl, `optimal_token_baseline`).

    A_it = G_it - B_t        G_it: the rewards of rollout i from token t on
    B_t  = sum over i of G_it W_it / (sum over i of W_it + epsilon)        over the rollouts with a token t
    W_it = sum over u <= t of (1 - 2 pi_iu + sum over the vocabulary of pi^2)        the squared norm of the scores so far

With `handle_zero_tail` the tokens of the longest rollout beyond the second longest have the baseline 0. Equal to verl's
`tir_optimal_token_baseline`, and for one turn to `optimal_token_baseline` (verl/trainer/ppo/core_algos.py at 018f23b5), except
that groups of one, and of equal rewards without costs, get exactly 0, and that no importance weight scales W.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prime_node.algo.advantages.token_base import TokenInputs, discounted_sums, token_needs


@token_needs("score_norms")
def optimal_token_baseline(
    inputs: TokenInputs, *, handle_zero_tail: bool = True, epsilon: float = 1e-8
) -> list[list[float]]:
    """Return the advantage of each token."""
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
