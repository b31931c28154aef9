"""Whitening of advantages over the groups of one optimizer step.

    A' = (A - mean) / sqrt(variance + 1e-8)        over the sampled tokens: a rollout counts once for each of its tokens

The variance is the sample's, as in verl's `masked_whiten`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def whitened(groups: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> list[tuple[float, ...]]:
    """Return the advantages of each group, whitened together. `tokens` are the rollouts' numbers of tokens."""
    pairs = [
        pair for advantages, counts in zip(groups, tokens, strict=True) for pair in zip(advantages, counts, strict=True)
    ]
    total = sum(count for _, count in pairs)
    if total < 2:
        return [(0.0,) * len(advantages) for advantages in groups]
    mean = math.fsum(value * count for value, count in pairs) / total
    variance = math.fsum((value - mean) ** 2 * count for value, count in pairs) / (total - 1)
    return [tuple((value - mean) / math.sqrt(variance + 1e-8) for value in advantages) for advantages in groups]
