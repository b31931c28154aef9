"""Filter of repetitive text. The settings choose one of two rules.

a streak (MiniMax-M1, arXiv 2506.13585, section 3.2): `window` tokens in a row with probability > prob_threshold
threshold: the share of n-grams that occurred before in the same completion is above it
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from prime_node.algo.filters.base import FilterInputs


def repetition(
    inputs: FilterInputs,
    *,
    threshold: float | None = None,
    ngram: int = 4,
    window: int = 3_000,
    prob_threshold: float = 0.99,
) -> list[bool]:
    """Flag completions by the second rule, over n-grams of `ngram` tokens, if `threshold` is given, else by the first."""
    completions = inputs.group.completions
    if threshold is not None:
        return [_repeated_share(completion.token_ids, ngram) > threshold for completion in completions]
    logprob_min = math.log(prob_threshold)
    return [_longest_streak(completion.logprobs, logprob_min) >= window for completion in completions]


def _repeated_share(token_ids: Sequence[int], ngram: int) -> float:
    total = len(token_ids) - ngram + 1
    if total < 2:
        return 0.0
    distinct = {tuple(token_ids[start : start + ngram]) for start in range(total)}
    return 1.0 - len(distinct) / total


def _longest_streak(logprobs: Sequence[float], logprob_min: float) -> int:
    longest = streak = 0
    for logprob in logprobs:
        streak = streak + 1 if logprob > logprob_min else 0
        longest = max(longest, streak)
    return longest
