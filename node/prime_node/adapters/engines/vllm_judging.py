"""Extension of vLLM's worker for judging: it keeps hidden states of prompts and computes from them what the checks need.

vLLM calls one method after each forward pass to collect logprobs of prompts, with all hidden states of the pass. A wrapper of
that method keeps the rows of sequences that are judged. Logits come later, from the head that samples, in blocks. So neither
rows nor logits of the prompt itself cost anything, and prefixes stay shared.

Letters: N positions, T tokens to judge, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from prime_node.adapters.engines.token_scores import Judged, judge_tokens
from prime_node.adapters.engines.vllm_worker_extension import WorkerExtension
from prime_protocol.assignment import Sampling

JUDGE_ARGUMENT = "prime_judge"
"""Key of SamplingParams.extra_args for (name of the sequence, first position whose hidden state is kept)."""
HEAD_ROWS_MIN = 16
"""Rows that the head gets at least: vLLM has other kernels on a CPU for a few rows, and workers mostly sample more at a time."""


@dataclass(frozen=True, slots=True)
class JudgedSequence:
    """A sequence that was forwarded, and what to judge in it. It travels between processes as a tuple of its fields."""

    name: str
    first: int
    """First position whose hidden state was kept."""
    end: int
    """Number of forwarded tokens."""
    shared: int
    """Number of tokens that it has in common with the sequence before it: hidden states below that may be that sequence's."""
    places: list[int]
    """[T] Position in the sequence of each token to judge."""
    tokens: list[int]
    """[T] The tokens."""
    seeds: list[int | None]
    positions: list[int]
    """[T] Position of each token in its completion."""


class JudgingExtension(WorkerExtension):
    """Mixin for vLLM's worker class of a validator."""

    prime_hidden: dict[str, dict[int, Tensor]]
    """Kept hidden states by name of the sequence and first position."""

    def prime_watch(self) -> None:
        """Keep hidden states of sequences to judge from now on."""
        self.prime_hidden = {}
        runner = self.model_runner
        collect = runner._get_prompt_logprobs_dict

        def collect_and_keep(hidden_NH: Tensor, num_scheduled: Mapping[str, int]) -> Any:
            self._keep_prompts(hidden_NH, num_scheduled)
            return collect(hidden_NH, num_scheduled)

        runner._get_prompt_logprobs_dict = collect_and_keep

    def prime_judge(
        self, sequences: Sequence[tuple[Any, ...]], sampling_json: str, keep_hidden: bool
    ) -> list[bytes | None]:
        """Judge sequences and forget their hidden states. Return the bytes of each field of Judged, or None where it is None."""
        sampling = Sampling.model_validate_json(sampling_json)
        asked = [JudgedSequence(*fields) for fields in sequences]
        hidden_TH = taken_rows(asked, self.prime_hidden)
        judged = judge_tokens(
            _Head(self.model_runner),
            hidden_TH,
            torch.tensor([token for one in asked for token in one.tokens], device=hidden_TH.device),
            [seed for one in asked for seed in one.seeds],
            [position for one in asked for position in one.positions],
            sampling,
            keep_hidden=keep_hidden,
        )
        return [None if each is None else _bytes_of(each) for each in judged]

    def prime_forget(self, names: Sequence[str]) -> None:
        """Forget the hidden states of sequences that will not be judged."""
        for name in names:
            self.prime_hidden.pop(name, None)

    def _keep_prompts(self, hidden_NH: Tensor, num_scheduled: Mapping[str, int]) -> None:
        runner = self.model_runner
        for request_id, count in num_scheduled.items():
            request = runner.requests[request_id]
            name, first = (request.sampling_params.extra_args or {}).get(JUDGE_ARGUMENT, (None, 0))
            if name is None:
                continue
            start = int(request.num_computed_tokens)
            skipped = max(0, first - start)
            offset = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]])
            if skipped < count:  # cloned, since the next pass may reuse the memory
                rows = hidden_NH[offset + skipped : offset + count].clone()
                self.prime_hidden.setdefault(name, {})[start + skipped] = rows


def taken_rows(asked: Sequence[JudgedSequence], kept: dict[str, dict[int, Tensor]]) -> Tensor:
    """Remove kept hidden states; return those [T, H] that the tokens are chosen from. Raises RuntimeError if one is missing."""
    found = [_Rows(one, kept.pop(one.name, {})) for one in asked]
    for before, after in pairwise(found):
        after.complete(before, end=after.asked.shared)
    for before, after in reversed(list(pairwise(found))):
        before.complete(after, end=after.asked.shared)
    return torch.cat([rows.chosen() for rows in found])


class _Rows:
    """Hidden states of one sequence, from its first position on."""

    def __init__(self, asked: JudgedSequence, chunks: Mapping[int, Tensor]) -> None:
        self.asked = asked
        if not chunks:
            raise RuntimeError(f"vLLM forwarded 0 of {asked.end - asked.first} positions of a sequence")
        (width,) = {chunk.shape[1] for chunk in chunks.values()}
        self._rows = next(iter(chunks.values())).new_empty(asked.end - asked.first, width)
        self._is_there = torch.zeros(len(self._rows), dtype=torch.bool)
        for start, chunk in chunks.items():
            place = slice(start - asked.first, start - asked.first + len(chunk))
            self._rows[place], self._is_there[place] = chunk, True

    def complete(self, other: _Rows, *, end: int) -> None:
        """Copy missing rows below position `end` from a sequence with the same tokens up to there."""
        start = max(self.asked.first, other.asked.first)
        mine, theirs = (slice(start - one.first, max(start, end) - one.first) for one in (self.asked, other.asked))
        copied = (~self._is_there[mine] & other._is_there[theirs]).nonzero()[:, 0]
        self._rows[mine][copied] = other._rows[theirs][copied]
        self._is_there[mine][copied] = True

    def chosen(self) -> Tensor:
        """Return the rows that the tokens are chosen from."""
        if not self._is_there.all():
            present = int(self._is_there.sum())
            raise RuntimeError(f"vLLM forwarded {present} of {len(self._rows)} positions of a sequence")
        return self._rows[torch.tensor(self.asked.places) - self.asked.first - 1]


class _Head:
    """Output head of vLLM's model, as token_scores.OutputHead."""

    def __init__(self, runner: Any) -> None:
        self._model: Any = runner.get_model()
        self.vocab_size: int = runner.model_config.get_vocab_size()

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return the logits without the temperature that sampling divides by."""
        padded = hidden_NH
        if 0 < len(hidden_NH) < HEAD_ROWS_MIN:
            padded = hidden_NH.repeat(-(-HEAD_ROWS_MIN // len(hidden_NH)), 1)
        logits_NV: Tensor = type(self._model).compute_logits(self._model, padded)
        return logits_NV[: len(hidden_NH)].float()


def _bytes_of(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def judged_from(fields: Sequence[bytes | None], num_tokens: int) -> Judged:
    """Return what `prime_judge` encoded. All fields are float32, except for hidden states in bf16."""
    columns: list[Any] = []
    for name, data in zip(Judged._fields, fields, strict=True):
        if data is None:
            columns.append(None)
        elif name == "hidden_TD":
            columns.append(torch.frombuffer(bytearray(data), dtype=torch.bfloat16).reshape(num_tokens, -1))
        else:
            columns.append(torch.frombuffer(bytearray(data), dtype=torch.float32))
    return Judged(*columns)
