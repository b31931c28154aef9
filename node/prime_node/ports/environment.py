"""Problems and their scoring."""

from __future__ import annotations

from typing import Protocol


class Environment(Protocol):
    """A numbered, endless set of problems with a deterministic score.

    Everything is a pure function of the arguments and of the EnvironmentSpec that built it: two machines agree on each
    problem and on each score. Training problems and evaluation problems never overlap.
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

    def held_out(self, count: int) -> list[HeldOutProblem]:
        """The first `count` evaluation problems, by the evaluation's own seed."""
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
