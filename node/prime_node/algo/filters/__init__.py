"""Filters, one a file: which rollouts are not trained on. What they flag stays in the metrics, by the filter's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prime_node.algo.filters.base import Filter, FilterInputs
from prime_node.algo.filters.zero_advantage import zero_advantage
from prime_node.algo.registry import choose

__all__ = ["FILTERS", "Filter", "FilterInputs", "find_filters", "flags"]

FILTERS: Mapping[str, Filter] = {"zero_advantage": zero_advantage}


def find_filters(names: Sequence[str]) -> dict[str, Filter]:
    """In the order of `names`. Raises LocalError."""
    return {name: choose("filter", name, FILTERS) for name in names}


def flags(filters: Mapping[str, Filter], inputs: FilterInputs) -> list[str | None]:
    """For each completion the first filter that takes it out, or None where it is trained."""
    result: list[str | None] = [None] * len(inputs.advantages)
    for name, flag in filters.items():
        for index, flagged in enumerate(flag(inputs)):
            if flagged and result[index] is None:
                result[index] = name
    return result
