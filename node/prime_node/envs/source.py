"""Sources of problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SourceProblem:
    """One drawn problem. Example: SourceProblem("Spell this word backward: sun", "nus", entry=...)."""

    question: str
    answer: str
    """Reference answer."""
    entry: Any = None
    """Data that the source needs to grade the problem."""


class ProblemSource(Protocol):
    """A numbered set of problems, the same on every machine. Different numbers may give the same problem.

    Sources need not separate training and evaluation: `SplitEnvironment` does.
    """

    def draw(self, number: int) -> SourceProblem:
        """Return problem `number`, any number >= 0. Pure and fast."""
        ...

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return the credit for an answer, in [0, 1]; 1 if it is right. Pure."""
        ...
