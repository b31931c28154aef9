"""Where problems come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SourceProblem:
    """One drawn problem. Example: SourceProblem("Spell this word backward: sun", "nus", entry=...)."""

    question: str
    answer: str
    """The reference answer."""
    entry: Any = None
    """What the source needs to grade it."""


class ProblemSource(Protocol):
    """A numbered set of problems, the same on every machine. Different numbers may give the same problem.

    Sources need not keep training and evaluation apart: `SplitEnvironment` does.
    """

    def draw(self, number: int) -> SourceProblem:
        """Problem `number`, any number >= 0. Pure and fast."""
        ...

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Credit for an answer, in [0, 1]; 1 where it is right. Pure."""
        ...
