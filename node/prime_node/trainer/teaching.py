"""On-policy distillation: a teacher's logprobs for the samples of mode `opd`.

Concurrency: a step waits for the teacher's server, without a deadline and with the reason in the log; a few requests
run concurrently. Cancelling the step ends every wait.

A worker chooses the tokens of a sample. So a sample that the teacher refuses is left out, and does not end the trainer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from prime_node.patience import ask_until_answered, causes_of
from prime_node.ports.clock import Clock
from prime_node.ports.teacher import Teacher, TeacherRefusal
from prime_node.ports.train_backend import TrainingMode, TrainSample
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import RunSpec

log = logging.getLogger(__name__)

SEQUENCES_MAX = 32
"""Sequences of one request."""
REQUESTS_MAX = 4
"""Concurrent requests: the server batches them."""


async def taught(samples: Sequence[TrainSample], teacher: Teacher | None, *, clock: Clock) -> tuple[TrainSample, ...]:
    """Return the samples in order, those of mode `opd` with the teacher's logprobs.

    Leave out samples that the teacher refuses even alone, with a warning. Raises LocalError.
    """
    wanted = [index for index, sample in enumerate(samples) if sample.mode is TrainingMode.OPD]
    if not wanted:
        return tuple(samples)
    assert teacher is not None, "Recipe.of refuses mode opd without a teacher"
    server, gate = teacher, asyncio.Semaphore(REQUESTS_MAX)

    async def score(indices: Sequence[int]) -> list[tuple[float, ...]]:
        sequences = [samples[index].prompt_token_ids + samples[index].completion_token_ids for index in indices]
        async with gate:
            return await ask_until_answered(lambda: server.logprobs(sequences), what="the teacher", clock=clock)

    async def ask(indices: Sequence[int]) -> list[tuple[float, ...] | None]:
        try:
            return [*await score(indices)]
        except TeacherRefusal as refusal:
            if len(indices) > 1:
                return [one for index in indices for one in await ask([index])]
            log.warning("a sample is left out: %s", refusal)
            return [None]

    parts = [wanted[start : start + SEQUENCES_MAX] for start in range(0, len(wanted), SEQUENCES_MAX)]
    try:
        async with asyncio.TaskGroup() as asking:
            tasks = [asking.create_task(ask(part)) for part in parts]
    except ExceptionGroup as failed:
        raise causes_of(failed)[0] from None
    result: list[TrainSample | None] = list(samples)
    for part, task in zip(parts, tasks, strict=True):
        for index, logprobs in zip(part, task.result(), strict=True):
            length = len(samples[index].completion_token_ids)
            known = None if logprobs is None else replace(samples[index], teacher_logprobs=logprobs[-length:])
            result[index] = known
    return tuple(sample for sample in result if sample is not None)


async def check_teacher(teacher: Teacher, spec: RunSpec, *, clock: Clock) -> None:
    """Warn if the teacher refuses sequences or tokens that the run allows.

    Waits until the teacher answers. Raises LocalError if it refuses every sequence.
    """

    async def is_scored(*token_ids: int) -> bool:
        try:
            await ask_until_answered(lambda: teacher.logprobs([token_ids]), what="the teacher", clock=clock)
        except TeacherRefusal as refusal:
            log.warning("%s", refusal)
            return False
        return True

    if not await is_scored(0, 0):
        raise LocalError("the teacher refuses a sequence of two tokens; serve a causal model with the run's tokenizer")
    if not await is_scored(0, spec.vocab_size - 1):
        log.warning("the teacher lacks some of the run's %d token ids; samples with them are left out", spec.vocab_size)
    longest = max(map(spec.context_tokens_max, spec.environments))
    tokens_max = await ask_until_answered(teacher.sequence_tokens_max, what="the teacher", clock=clock)
    if tokens_max is not None and tokens_max < longest:
        log.warning(
            "the teacher scores sequences of at most %d tokens, and the run allows %d; longer samples are left out. Raise its "
            "--max-model-len",
            tokens_max,
            longest,
        )
