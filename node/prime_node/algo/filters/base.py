"""What a filter takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from prime_node.ports.train_backend import Group


@dataclass(frozen=True, slots=True)
class FilterInputs:
    """One group with its advantages."""

    group: Group
    advantages: tuple[float, ...]
    """One for each completion of the group."""
    vocab_size: int
    """Of the model."""


FilterFunction = Callable[..., Sequence[bool]]
"""(FilterInputs, **settings) -> for each completion of the group: True where it is flagged."""
