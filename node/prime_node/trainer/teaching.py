"""On-policy distillation: a teacher's logprobs for the samples of mode `opd`.

Concurrency: a step waits for the teacher's server, without a deadline and with the reason in the log; a few requests
run concurrently. Cancelling the step ends every wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from prime_node.patience import ask_until_answered, causes_of
from prime_node.ports.clock import Clock
from prime_node.ports.teacher import Teacher
from prime_node.ports.train_backend import TrainingMode, TrainSample

SEQUENCES_MAX = 32
"""Sequences of one request."""
REQUESTS_MAX = 4
"""Concurrent requests: the server batches them."""


async def taught(samples: Sequence[TrainSample], teacher: Teacher | None, *, clock: Clock) -> tuple[TrainSample, ...]:
    """Return the samples in order, those of mode `opd` with the teacher's logprobs. Raises LocalError."""
    wanted = [index for index, sample in enumerate(samples) if sample.mode is TrainingMode.OPD]
    if not wanted:
        return tuple(samples)
    assert teacher is not None, "Recipe.of refuses mode opd without a teacher"
    server, gate = teacher, asyncio.Semaphore(REQUESTS_MAX)

    async def ask(indices: Sequence[int]) -> list[tuple[float, ...]]:
        sequences = [samples[index].prompt_token_ids + samples[index].completion_token_ids for index in indices]
        async with gate:
            return await ask_until_answered(lambda: server.logprobs(sequences), what="the teacher", clock=clock)

    parts = [wanted[start : start + SEQUENCES_MAX] for start in range(0, len(wanted), SEQUENCES_MAX)]
    try:
        async with asyncio.TaskGroup() as asking:
            tasks = [asking.create_task(ask(part)) for part in parts]
    except ExceptionGroup as failed:
        raise causes_of(failed)[0] from None
    result = list(samples)
    for part, task in zip(parts, tasks, strict=True):
        for index, logprobs in zip(part, task.result(), strict=True):
            length = len(samples[index].completion_token_ids)
            result[index] = replace(samples[index], teacher_logprobs=logprobs[-length:])
    return tuple(result)
