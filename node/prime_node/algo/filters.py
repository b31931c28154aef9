"""Filters: which rollouts are not trained on. Flagged rollouts stay in the metrics, by the filter's name."""

from __future__ import annotations

import inspect
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_node.algo.registry import find_by_name
from prime_node.ports.train_samples import Group
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason


@dataclass(frozen=True, slots=True)
class FilterInputs:
    """One group with its advantages."""

    group: Group
    advantages: tuple[float, ...]
    """Advantages, one for each completion of the group."""
    vocab_size: int
    """Vocabulary size of the model."""


FilterFunction = Callable[..., Sequence[bool]]
"""(FilterInputs, **settings) -> for each completion of the group: True if it is flagged."""


def gibberish(
    inputs: FilterInputs,
    *,
    threshold: float | None = None,
    token_id_threshold: int = 100_000,
    logprob_offset: float = 2.0,
) -> list[bool]:
    """Flag text that the policy itself finds improbable.

    With `threshold`, nats: completions whose mean logprob is below it. Else those with a rare token that was less probable than a
    blind guess (arXiv 2510.02387, section 5.2): id > token_id_threshold and logprob < -log(vocabulary) - logprob_offset.
    """
    completions = inputs.group.completions
    if threshold is not None:
        return [
            bool(completion.logprobs) and statistics.fmean(completion.logprobs) < threshold
            for completion in completions
        ]
    logprob_min = -math.log(inputs.vocab_size) - logprob_offset
    return [_has_absurd_token(completion, token_id_threshold, logprob_min) for completion in completions]


def _has_absurd_token(completion: Completion, token_id_max: int, logprob_min: float) -> bool:
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    return any(token > token_id_max and logprob < logprob_min for token, logprob in pairs)


def repetition(
    inputs: FilterInputs,
    *,
    threshold: float | None = None,
    ngram: int = 4,
    window: int = 3_000,
    prob_threshold: float = 0.99,
) -> list[bool]:
    """Flag repetitive text.

    With `threshold`: completions of which a larger share of n-grams of `ngram` tokens occurred before in the same completion.
    Else those with `window` tokens in a row with probability > prob_threshold (MiniMax-M1, arXiv 2506.13585, section 3.2).
    """
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


def ended_truncated(inputs: FilterInputs) -> list[bool]:
    """Flag rollouts that ended at the length limit, whose reward says little (DAPO's overlong filtering, arXiv 2503.14476).

    They count in their group's advantages, as with TRL's `mask_truncated_completions`.
    """
    return [completion.finish is FinishReason.LENGTH for completion in inputs.group.completions]


def zero_advantage(inputs: FilterInputs) -> list[bool]:
    """Flag rollouts whose advantage is exactly 0: they cost a forward pass and give no gradient.

    It removes a group of equal rewards as a whole.
    """
    return [advantage == 0.0 for advantage in inputs.advantages]


FILTERS: Mapping[str, FilterFunction] = {
    "gibberish": gibberish,
    "repetition": repetition,
    "truncated": ended_truncated,
    "zero_advantage": zero_advantage,
}


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter with its settings."""

    name: str
    function: FilterFunction
    settings: Mapping[str, Any] = field(default_factory=dict)
    enforce: bool = True
    """Whether flagged rollouts are removed. False: they are only counted."""

    def __call__(self, inputs: FilterInputs) -> Sequence[bool]:
        """Return for each completion whether the filter flags it."""
        return self.function(inputs, **self.settings)


def find_filter(name: str, *, kwargs: Mapping[str, Any] | None = None, enforce: bool = True) -> Filter:
    """Find a filter by name, with its settings. Raises LocalError."""
    settings = dict(kwargs or {})
    function = find_by_name("filter", name, FILTERS)
    try:
        inspect.signature(function).bind(None, **settings)
    except TypeError as error:
        raise LocalError(f"filter {name}: {error}") from None
    return Filter(name, function, settings, enforce)


def flags(filters: Sequence[Filter], inputs: FilterInputs) -> list[Filter | None]:
    """Return for each completion the first filter that flags it, or None."""
    result: list[Filter | None] = [None] * len(inputs.advantages)
    for its in filters:
        for index, flagged in enumerate(its(inputs)):
            if flagged and result[index] is None:
                result[index] = its
    return result
