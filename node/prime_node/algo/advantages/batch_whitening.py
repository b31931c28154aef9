"""Whitening of advantages over the groups of one optimizer step.

    A' = (A - mean) / sqrt(variance + 1e-8)        over the sampled tokens: a rollout counts once for each of its tokens

The variance is the sample's, as in verl's `masked_whiten`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, pairwise

import numpy as np
import numpy.typing as npt


def whitened_tokens(rollouts: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the advantages of each rollout's tokens, whitened together."""
    values_T = np.fromiter(chain.from_iterable(rollouts), np.float64)
    white = _whitened(values_T, np.ones(len(values_T))).tolist()
    ends = np.cumsum([0, *map(len, rollouts)]).tolist()
    return [white[start:end] for start, end in pairwise(ends)]


def whitened(groups: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return the advantages of each group, whitened together. `tokens` are the rollouts' numbers of tokens."""
    values_R = np.fromiter(chain.from_iterable(groups), np.float64)
    left = iter(_whitened(values_R, np.fromiter(chain.from_iterable(tokens), np.float64)).tolist())
    return [tuple(next(left) for _ in advantages) for advantages in groups]


def _whitened(values_N: npt.NDArray[np.float64], counts_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the values with mean 0 and deviation 1, each counted so often. The sums are exact, whatever their order."""
    assert len(values_N) == len(counts_N), "one number of tokens for each rollout"
    total = counts_N.sum()
    if total < 2:
        return np.zeros_like(values_N)
    apart_N = values_N - math.fsum((values_N * counts_N).tolist()) / total
    variance = math.fsum((np.square(apart_N) * counts_N).tolist()) / (total - 1)
    white_N: npt.NDArray[np.float64] = apart_N / math.sqrt(variance + 1e-8)
    return white_N
