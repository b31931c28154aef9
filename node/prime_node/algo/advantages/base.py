"""What an advantage takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """One group, of any size: groups may have lost rollouts. Example: AdvantageInputs((1.0, 0.0), (5, 8))."""

    rewards: tuple[float, ...]
    completion_lengths: tuple[int, ...]
    """Tokens, one for each reward."""


Advantage = Callable[[AdvantageInputs], Sequence[float]]
"""One advantage for each rollout, in their order."""
