"""Inputs and outputs of a filter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prime_node.ports.train_samples import Group


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
