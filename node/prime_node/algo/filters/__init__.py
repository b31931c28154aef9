"""Filters, one a file: which rollouts are not trained on. Flagged rollouts stay in the metrics, by the filter's name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_node.algo.filters.base import FilterFunction, FilterInputs
from prime_node.algo.filters.gibberish import gibberish
from prime_node.algo.filters.repetition import repetition
from prime_node.algo.filters.truncated import ended_truncated
from prime_node.algo.filters.zero_advantage import zero_advantage
from prime_node.algo.registry import find_by_name
from prime_protocol.errors import LocalError

__all__ = ["FILTERS", "Filter", "FilterInputs", "find_filter", "flags"]

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
