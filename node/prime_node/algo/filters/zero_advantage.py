"""Rollouts without an advantage: they cost a forward pass and give no gradient. A group of equal rewards falls out whole."""

from __future__ import annotations

from prime_node.algo.filters.base import FilterInputs


def zero_advantage(inputs: FilterInputs) -> list[bool]:
    return [advantage == 0.0 for advantage in inputs.advantages]
