"""The teacher: a model that scores the student's own tokens (on-policy distillation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Teacher(Protocol):
    """The operator's own, trusted model. It uses the student's tokenizer."""

    async def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Return the logprob in nats, at temperature 1, of every token of each sequence except its first.

        Idempotent. Raises Unreachable if the caller may retry, LocalError if a retry would not help.
        """
        ...

    async def close(self) -> None:
        """Release resources. Idempotent."""
        ...
