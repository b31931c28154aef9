"""Filter of rollouts without an advantage: they cost a forward pass and give no gradient.

It removes a group of equal rewards as a whole.
"""

from __future__ import annotations

from prime_node.algo.filters.base import FilterInputs


def zero_advantage(inputs: FilterInputs) -> list[bool]:
    """Flag rollouts whose advantage is exactly 0."""
    return [advantage == 0.0 for advantage in inputs.advantages]
