"""On-policy distillation: a teacher's logprobs for the samples of mode `opd`, or its likeliest tokens.

Concurrency: a step waits for the teacher's server, without a deadline and with the reason in the log; a few requests
run concurrently. Cancelling the step ends every wait.

A worker chooses the tokens of a sample. So a sample that the teacher refuses is left out, and does not end the trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from prime_node.patience import ask_until_answered, at_once
from prime_node.ports.clock import Clock
from prime_node.ports.teacher import Teacher, TeacherRefusal
from prime_node.ports.train_backend import KeptPolicy, TrainBackend
from prime_node.ports.train_samples import TopLogprobs, TrainingMode, TrainSample
from prime_node.trainer.recipe import Recipe
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import RunSpec

log = logging.getLogger(__name__)

SEQUENCES_MAX = 32
"""Sequences of one request."""
REQUESTS_MAX = 4
"""Concurrent requests: the server batches them."""
ENTRIES_MAX = 2**18
"""Logprobs of one answer, unless one sequence has more. An answer is text, 80 bytes each; all of it takes 0.4 s to load."""


async def taught(
    samples: Sequence[TrainSample], teacher: Teacher | None, *, clock: Clock, vocab_size: int, topk: int = 0
) -> tuple[TrainSample, ...]:
    """Return the samples in order, those of mode `opd` with the teacher's logprobs, or with its `topk` likeliest tokens.

    Leave out samples that the teacher refuses even alone, with a warning, and likely tokens that the student lacks.
    Raises LocalError.
    """
    wanted = [index for index, sample in enumerate(samples) if sample.mode is TrainingMode.OPD]
    if not wanted:
        return tuple(samples)
    assert teacher is not None, "Recipe.of refuses mode opd without a teacher"
    server = teacher

    async def score(indices: Sequence[int]) -> Sequence[tuple[float, ...] | TopLogprobs]:
        sequences = [samples[index].prompt_token_ids + samples[index].completion_token_ids for index in indices]
        call: Callable[[], Awaitable[Sequence[tuple[float, ...] | TopLogprobs]]] = partial(server.logprobs, sequences)
        if topk:
            call = partial(server.top_logprobs, sequences, topk)
        return await ask_until_answered(call, what="the teacher", clock=clock)

    async def ask(indices: Sequence[int]) -> list[tuple[float, ...] | TopLogprobs | None]:
        try:
            return [*await score(indices)]
        except TeacherRefusal as refusal:
            if len(indices) > 1:
                return [one for index in indices for one in await ask([index])]
            log.warning("a sample is left out: %s", refusal)
            return [None]

    longest = max(len(samples[i].prompt_token_ids) + len(samples[i].completion_token_ids) for i in wanted)
    width = vocab_size if topk < 0 else topk + 1
    size = max(1, min(SEQUENCES_MAX, ENTRIES_MAX // (longest * width)))
    parts = [wanted[start : start + size] for start in range(0, len(wanted), size)]
    answers = await at_once([partial(ask, part) for part in parts], most=REQUESTS_MAX)
    result: list[TrainSample | None] = list(samples)
    for part, answer in zip(parts, answers, strict=True):
        for index, found in zip(part, answer, strict=True):
            result[index] = None if found is None else _with_teacher(samples[index], found, vocab_size)
    return tuple(sample for sample in result if sample is not None)


def self_taught(samples: Sequence[TrainSample], recipe: Recipe, backend: TrainBackend) -> tuple[TrainSample, ...]:
    """Return the samples in order, those of mode `opsd` with the policy's own logprobs under the prompt that holds the answer.

    Leave out samples that are then longer than the model's positions, and those without an answer. For the trainer's thread.
    """
    is_own = [sample.mode is TrainingMode.OPSD for sample in samples]
    hinted = {
        index: replace(sample, prompt_token_ids=sample.teacher_prompt_token_ids)
        for index, sample in enumerate(samples)
        if is_own[index]
        and sample.teacher_prompt_token_ids
        and len(sample.teacher_prompt_token_ids) + len(sample.completion_token_ids) <= backend.sequence_tokens_max
    }
    if left_out := sum(is_own) - len(hinted):
        log.warning("%d samples of mode opsd are left out: no answer, or one that is too long for the model", left_out)
    its = list(hinted.values())
    teacher = KeptPolicy.REFERENCE if recipe.is_taught_by_reference else None
    found: list[Sequence[float] | TopLogprobs]
    found = [*(backend.top_logprobs(its, recipe.topk, teacher) if recipe.topk else backend.logprobs(its, teacher))]
    known = dict(zip(hinted, found, strict=True))
    return tuple(
        _with_teacher(sample, known[index], recipe.vocab_size) if index in known else sample
        for index, sample in enumerate(samples)
        if index in known or not is_own[index]
    )


def _with_teacher(sample: TrainSample, found: Sequence[float] | TopLogprobs, vocab_size: int) -> TrainSample:
    """Return the sample with what the teacher found at its completion, which ends the sequence."""
    first = len(found) - len(sample.completion_token_ids)
    if isinstance(found, TopLogprobs):
        return replace(sample, teacher_top=_within(found[first:], vocab_size))
    return replace(sample, teacher_logprobs=tuple(found[first:]))


def _within(found: TopLogprobs, vocab_size: int) -> TopLogprobs:
    """Return the tokens with those beyond the student's vocabulary as token 0 with a logprob of -inf, which no loss counts."""
    is_known_NK = (found.token_ids_NK >= 0) & (found.token_ids_NK < vocab_size)
    return TopLogprobs(
        np.where(is_known_NK, found.token_ids_NK, 0),
        np.where(is_known_NK, found.logprobs_NK, np.float32(-np.inf)),
    )


async def check_teacher(teacher: Teacher, spec: RunSpec, *, clock: Clock, topk: int = 0) -> None:
    """Warn if the teacher refuses sequences or tokens that the run allows.

    Waits until the teacher answers. Raises LocalError if it refuses every sequence, or so many likeliest tokens.
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
    if topk:
        try:
            await ask_until_answered(lambda: teacher.top_logprobs([(0, 0)], topk), what="the teacher", clock=clock)
        except TeacherRefusal as refusal:
            raise LocalError(
                f"the teacher refuses trainer.distillation.topk = {topk}: {refusal}; start vLLM with --max-logprobs {topk}"
            ) from None
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
