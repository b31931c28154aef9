"""Problems and their scoring."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from prime_protocol.rollout import Completion

GRADED_TOGETHER: ContextVar[str] = ContextVar("graded together", default="")
"""Name of the set of answers that is graded now. An answer that misuses its scorer can change the rewards of its own set, and of
no other. Without a name, each answer is a set."""


@contextmanager
def graded_together() -> Iterator[None]:
    """Grade what follows as one set of answers: those of one bundle, or of one evaluation."""
    token = GRADED_TOGETHER.set(secrets.token_hex(8))
    try:
        yield
    finally:
        GRADED_TOGETHER.reset(token)


class EnvironmentGone(Exception):
    """The environment's process exited during a request, or was killed because it did not answer.

    The result of the request is unknown.
    """


class EnvironmentSilent(Exception):
    """One episode was idle for too long and was ended.

    The process can serve other episodes; retrying this one would time out again.
    """


class Environment(Protocol):
    """A numbered, endless set of problems with a deterministic score.

    Everything is a pure function of the arguments and of the EnvironmentSpec that built it: two machines agree on each
    problem and on each score. Training problems and evaluation problems never overlap. Index HELD_OUT_START + n
    (prime_protocol/assignment.py) is evaluation problem n, in every method that takes an index.
    """

    def prompt(self, index: int) -> str:
        """Return the text of training problem `index` (any index >= 0), without the tokenizer's template."""

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        """Return the reward in [0, 1] of a completion's text for training problem `index`.

        `finished` is whether the completion ended with a stop token.
        """

    def answer(self, index: int) -> str:
        """Return the reference answer, for supervised training on the task's format."""

    def held_out(self, count: int) -> Sequence[HeldOutProblem]:
        """Return the first `count` evaluation problems, by the evaluation's own seed."""


@runtime_checkable
class PartedEnvironment(Environment, Protocol):
    """An environment that can name further rewards of a completion."""

    def parts(self, index: int, completion: str, *, finished: bool) -> Mapping[str, float]:
        """Return them by name for training problem `index`; none where the completion holds no answer."""


Ask = Callable[[tuple[int, ...]], Awaitable[Completion | None]]
"""Function that returns the model's completion of a prompt. It returns None if the rollout has no turn or no room left;
the episode must then end."""


@runtime_checkable
class TurnEnvironment(Environment, Protocol):
    """A multi-turn environment: a rollout is several requests to the model."""

    async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        """Play one rollout of training problem `index` and return its reward.

        `prompt_token_ids` is `prompt` as the lease renders it. Every request is a pure function of the answers so far,
        unless the EnvironmentSpec says otherwise.
        """


@runtime_checkable
class PartedTurnEnvironment(TurnEnvironment, Protocol):
    """A multi-turn environment that can name further rewards of a rollout."""

    async def play_parts(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> Mapping[str, float]:
        """Play one rollout of training problem `index` as `play` does, and return its further rewards by name."""


@runtime_checkable
class TurnProblem(Protocol):
    """A held-out problem of a TurnEnvironment."""

    async def play(self, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
        """Play one rollout and return its reward as in training: 1 if and only if it ends exactly right."""


class HeldOutProblem(Protocol):
    """One evaluation problem."""

    @property
    def prompt(self) -> str:
        """Return the prompt's text, without the tokenizer's template."""

    def is_correct(self, completion: str, *, finished: bool) -> bool:
        """Return whether the completion is exactly right."""

    def score(self, completion: str, *, finished: bool) -> float:
        """Return the reward in [0, 1], as in training."""


class Tokenizer(Protocol):
    """Text <-> token ids, from the run's model files."""

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids."""

    @property
    def stop_token_id(self) -> int:
        """Return the token that ends a completion."""

    def encode_prompt(self, text: str) -> list[int]:
        """Return a problem's text as the model's input token ids, template included."""

    def encode(self, text: str) -> list[int]:
        """Encode plain text, without template or special tokens."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a completion, without special tokens. Invalid UTF-8 becomes U+FFFD."""
