"""A teacher in the test's own process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.ports.teacher import TeacherRefusal
from prime_node.ports.train_samples import TopLogprobs, TrainSample
from prime_node.ports.transport import Unreachable


class BackendTeacher:
    """Teacher that implements ports.teacher.Teacher in this process.

    It can be unreachable for the first requests, and gives at most `allowed` likeliest tokens.
    """

    def __init__(self, folder: Path, *, seed: int, away: int = 0, allowed: int = 264) -> None:
        self._backend = TorchBackend(folder, seed=seed, threads=1)
        self._allowed = allowed
        self.away = away

    async def logprobs(self, sequences: Sequence[tuple[int, ...]]) -> list[tuple[float, ...]]:
        if self.away:
            self.away -= 1
            raise Unreachable("the teacher is still starting")
        samples = [TrainSample(ids[:1], ids[1:], (0.0,) * (len(ids) - 1), 0.0) for ids in sequences]
        return [tuple(values) for values in self._backend.logprobs(samples)]

    async def top_logprobs(self, sequences: Sequence[tuple[int, ...]], count: int) -> list[TopLogprobs]:
        if count > self._allowed:
            raise TeacherRefusal("HTTP 400: greater than max allowed")
        samples = [TrainSample(ids[:1], ids[1:], (0.0,) * (len(ids) - 1), 0.0) for ids in sequences]
        return [*self._backend.top_logprobs(samples, count)]

    async def sequence_tokens_max(self) -> int | None:
        return None

    async def close(self) -> None: ...
