"""Sources of problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from prime_node.ports.environment import Environment, Tokenizer
from prime_protocol.limits import Limits


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

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return the credit for an answer, in [0, 1]; 1 if it is right. Pure."""


@runtime_checkable
class PartedSource(ProblemSource, Protocol):
    """A source that can name further rewards of an answer."""

    def parts(self, problem: SourceProblem, answer: str) -> Mapping[str, float]:
        """Return them by name. Pure."""


def parts_of(source: ProblemSource, problem: SourceProblem, answer: str) -> Mapping[str, float]:
    """Return the further rewards of an answer. Raises ValueError if the source has none."""
    if not isinstance(source, PartedSource):
        raise ValueError("only a reward function of the run's own that returns a dict names further rewards")
    return source.parts(problem, answer)


def prompt_of(environment: Environment, index: int, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return a problem's prompt: its environment's text, in the template of the run's model. It is never cut.

    Raises whatever the environment or the tokenizer raises.
    """
    return tuple(tokenizer.encode_prompt(environment.prompt(index)))


def is_leasable(prompt_token_ids: tuple[int, ...], limits: Limits) -> bool:
    """Return whether a prompt has a length that the run leases. The coordinator draws another problem if it has not."""
    return 1 <= len(prompt_token_ids) <= limits.prompt_tokens_max
