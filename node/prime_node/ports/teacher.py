"""A teacher: another model that says how probable it finds what the student wrote (on-policy distillation)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Teacher(Protocol):
    """Belongs to the operator and is trusted. Its tokens are the student's: the same tokenizer."""

    async def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        """Nats, at temperature 1, of every token of each sequence but its first, which nothing predicts.

        Idempotent. Raises Unreachable where it may be asked again, LocalError where that would not help.
        """
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...
