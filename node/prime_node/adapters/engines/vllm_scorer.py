"""The Scorer port over vLLM: a validator with the same kernels as its workers.

Prompt and completion are one prompt of a request that samples a single, discarded token. vLLM forwards the requests in large
batches, and its prefix cache computes what prompts of a group share once. The extension keeps the hidden states and judges.

Requests of one call may share more than their prompts: completions can begin alike. vLLM then computes no hidden states for
the shared blocks, and the rows come from the sequence before it in lexicographic order, which has the longest common prefix.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, ClassVar

from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind

from prime_node.adapters.engines.strings import String, strung
from prime_node.adapters.engines.token_scores import Judged, prefill_of
from prime_node.adapters.engines.vllm_engine import VllmEngine
from prime_node.adapters.engines.vllm_judging import (
    JUDGE_ARGUMENT,
    JudgedSequence,
    JudgingExtension,
    judged_from,
)
from prime_node.adapters.engines.vllm_worker_extension import WorkerExtension
from prime_node.ports.engine import ScoreRequest, Spans
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

BATCH_TOKENS_MAX = 2**16
"""Tokens of a batch, whose hidden states are in memory at a time."""


class VllmScorer(VllmEngine):
    """Implementation of ports.engine.SamplingScorer."""

    extension: ClassVar[type[WorkerExtension]] = JudgingExtension

    def __init__(self, folder: Path, **settings: Any) -> None:
        """Configure the scorer. The settings are those of VllmEngine."""
        super().__init__(folder, **settings)
        self._abandoned: list[str] = []
        """Names of sequences whose judging was interrupted."""

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        """Score completions in large batches. Raises EngineDied, or EngineMismatch for what vLLM cannot score."""
        assert self._loaded, "no weights have been loaded"
        found: dict[int, Judged] = {}
        self.require_known((*one.prompt_token_ids, *one.completion_token_ids) for one in requests)
        strings = strung(requests)
        for batch in _batches(strings):
            judged = await self._watch.call(self._judge([strings[i] for i in batch], sampling))
            found.update(zip(batch, judged.split([len(strings[i].chosen) for i in batch]), strict=True))
        self._watch.answered()
        return prefill_of(found[i] for i in range(len(found)))

    async def prefill_mixed(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        policies: Mapping[int, Weights],
    ) -> Prefill:
        """Raise LocalError: vLLM cannot forward the parts of one sequence by different weights."""
        raise LocalError("validator.engine = vllm cannot judge swap = keep_kv: use transformers")

    async def _start(self) -> None:
        await super()._start()
        await self._llm.collective_rpc("prime_watch")

    async def _judge(self, strings: Sequence[String], sampling: Sampling) -> Judged:
        """Score sequences that are in lexicographic order."""
        asked = []
        before: tuple[int, ...] = ()
        for string in strings:
            tokens = _forwarded(string)
            places = [len(string.prompt_token_ids) + place for place, _, _ in string.chosen]
            one = JudgedSequence(
                name=uuid.uuid4().hex,
                first=places[0] - 1,
                end=len(tokens),
                shared=_num_shared(before, tokens),
                places=places,
                tokens=[string.token_ids[place] for place, _, _ in string.chosen],
                seeds=[seed for _, seed, _ in string.chosen],
                positions=[position for _, _, position in string.chosen],
            )
            asked.append(one)
            before = tokens
        alone = _alone(asked)
        salt = uuid.uuid4().hex  # earlier calls leave no hidden states for their prefixes
        forwards = [
            self._forward(one, _forwarded(string), salt, is_alone=one.name in alone)
            for one, string in zip(asked, strings, strict=True)
        ]
        try:
            await asyncio.gather(*forwards)
        except BaseException:
            self._abandoned += [one.name for one in asked]
            raise
        if self._abandoned:
            abandoned, self._abandoned = self._abandoned, []
            await self._llm.collective_rpc("prime_forget", args=(abandoned,))
        keep_hidden = any(string.hidden for string in strings)
        arguments = ([astuple(one) for one in asked], sampling.model_dump_json(), keep_hidden)
        fields, *_ = await self._llm.collective_rpc("prime_judge", args=arguments)
        return judged_from(fields, sum(len(one.tokens) for one in asked))

    async def _forward(self, one: JudgedSequence, tokens: Sequence[int], salt: str, *, is_alone: bool) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=is_alone,
            extra_args={JUDGE_ARGUMENT: (one.name, one.first)},
        )
        async for _ in self._llm.generate(tokens_input(list(tokens), cache_salt=salt), params, one.name):
            pass


def _forwarded(string: String) -> tuple[int, ...]:
    """Return the tokens that are forwarded: no token is chosen from the last one's hidden state."""
    return (*string.prompt_token_ids, *string.token_ids)[:-1]


def _num_shared(before: Sequence[int], tokens: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, tokens, strict=False)))


def _alone(asked: Sequence[JudgedSequence]) -> set[str]:
    """Return the names of sequences that must compute everything: a neighbour lacks rows that they could have in common."""
    found = set()
    for before, after in pairwise(asked):
        earlier, later = sorted((before, after), key=lambda one: one.first)
        if earlier.first < min(later.first, after.shared):
            found.add(earlier.name)
    return found


def _batches(strings: Sequence[String]) -> Iterator[list[int]]:
    """Yield indices of strings to forward together, in lexicographic order of the forwarded tokens."""
    batch: list[int] = []
    num_tokens = 0
    forwarded = [_forwarded(string) for string in strings]
    for i in sorted(range(len(strings)), key=forwarded.__getitem__):
        if batch and num_tokens + len(forwarded[i]) > BATCH_TOKENS_MAX:
            yield batch
            batch, num_tokens = [], 0
        batch.append(i)
        num_tokens += len(forwarded[i])
    if batch:
        yield batch
