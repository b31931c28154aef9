"""Problems and their scoring."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

from prime_protocol.rollout import Completion


class EnvironmentGone(Exception):
    """The process that held an environment ended in the middle of a question, or had to be ended because it gave no answer:
    whatever was under way says nothing."""


class EnvironmentSilent(Exception):
    """One episode did nothing for too long and was ended. Its process answers others, and would be silent again for this one."""


class Environment(Protocol):
    """A numbered, endless set of problems with a deterministic score.

    Everything is a pure function of the arguments and of the EnvironmentSpec that built it: two machines agree on each
    problem and on each score. Training problems and evaluation problems never overlap. Index HELD_OUT_START + n
    (prime_protocol/assignment.py) is evaluation problem n, in every method that takes an index.
    """

    def prompt(self, index: int) -> str:
        """The text of training problem `index` (any index >= 0), without the template of the tokenizer."""
        ...

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        """Reward in [0, 1] of a completion's text for training problem `index`. `finished`: it ended with a stop token."""
        ...

    def answer(self, index: int) -> str:
        """The reference answer, for supervised training on the task's format."""
        ...

    def held_out(self, count: int) -> Sequence[HeldOutProblem]:
        """The first `count` evaluation problems, by the evaluation's own seed."""
        ...


Ask = Callable[[tuple[int, ...]], Awaitable[Completion | None]]
"""The model's answer to a prompt; None where the rollout has no turn or no room left, and then it must come to its end."""


@runtime_checkable
class TurnEnvironment(Environment, Protocol):
    """An environment that answers: a rollout is several requests to the model."""

    async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        """One rollout of training problem `index`; its reward. `prompt_token_ids`: what `prompt` is as the lease renders it.

        Everything that it asks for is a pure function of the answers so far, unless the EnvironmentSpec says otherwise.
        """
        ...


@runtime_checkable
class TurnProblem(Protocol):
    """A held-out problem of a TurnEnvironment."""

    async def play(self, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        """One rollout; its reward as in training, 1 where it ends exactly right and only there."""
        ...


class HeldOutProblem(Protocol):
    """One evaluation problem."""

    @property
    def prompt(self) -> str: ...

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        """True if the completion is exactly right."""
        ...

    def score(self, completion: str, *, finished: bool) -> float:
        """Reward in [0, 1], as in training."""
        ...


class Tokenizer(Protocol):
    """Text <-> token ids, from the run's model files."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_token_id(self) -> int:
        """Ends a completion."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """A problem's text as the token ids that the model is fed, template included."""
        ...

    def encode(self, text: str) -> list[int]:
        """Plain text, without template or special tokens."""
        ...

    def decode(self, token_ids: list[int]) -> str:
        """Text of a completion, without special tokens. Bytes that are no UTF-8 become U+FFFD."""
        ...
