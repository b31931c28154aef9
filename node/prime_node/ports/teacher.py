"""The teacher: a model that scores the student's own tokens (on-policy distillation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prime_node.ports.train_samples import TopLogprobs


class TeacherRefusal(Exception):
    """The teacher cannot score these sequences: one of them is too long, or has a token that the teacher lacks."""


class Teacher(Protocol):
    """The operator's own, trusted model. It uses the student's tokenizer."""

    async def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Return the logprob in nats, at temperature 1, of every token of each sequence except its first.

        Idempotent. Raises Unreachable if the caller may retry, TeacherRefusal if a part of the sequences may be
        scored, LocalError if a retry would not help.
        """

    async def top_logprobs(self, sequences: Sequence[tuple[int, ...]], count: int) -> list[TopLogprobs]:
        """Return the `count` likeliest tokens, at temperature 1, at every token of each sequence except its first.

        -1: the whole vocabulary. Otherwise as `logprobs`.
        """

    async def sequence_tokens_max(self) -> int | None:
        """Return the length of the longest sequence that it scores; None if it does not say. Raises as `logprobs`."""

    async def close(self) -> None:
        """Release resources. Idempotent."""
