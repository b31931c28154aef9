"""Engine and Scorer on transformers: for machines without vLLM, for validators, and as a reference for other engines.

All work runs in one dedicated thread, one call after another, so it does not block the event loop. A cancelled `generate` stops
that thread at the next token; the next call waits for it.

Letters: B completions, P different prompts, N positions to choose a token at, H hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from torch import Tensor

from prime_node import memory
from prime_node.adapters.engines.hidden_rows import HiddenRows
from prime_node.adapters.engines.strings import String, strung
from prime_node.adapters.engines.token_scores import (
    Judged,
    Mixture,
    judge_tokens,
    prefill_of,
    reference_scores,
    score_tokens,
)
from prime_node.adapters.models.causal_model import CausalModel
from prime_node.ports.engine import EngineMismatch, GenerateRequest, ScoreRequest, Spans
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, EngineInfo, FinishReason
from prime_protocol.schedule import SwapPolicy
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

T = TypeVar("T")

PROBE_ERROR_MAX = {"fp32": 2e-3, "bf16": 1.0}
"""Limit on the difference in nats between the engine and the plain forward pass on the probe, for each arithmetic. Honest bf16
reaches 0.2 for a model of 135 M parameters; other weights are nats away."""
PROBE_SAMPLING = Sampling(temperature=0.0, completion_tokens_max=1, stop_token_ids=())
KEPT_SHARE_MAX = 0.75
"""Share of unfinished completions at or below which finished ones leave the batch."""
MASK_BYTES = 8
"""Bytes of attention masks for each pair of tokens of one sequence."""


class TransformersEngine:
    """Implementation of ports.engine.SwappingEngine and ports.engine.Scorer."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "fp32",
        device: str = "cpu",
        threads: int | None = None,
        cache_bytes_max: int = 2**30,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Build the engine.

        `threads` sets torch's threads for this process; `cache_bytes_max` bounds one batch's keys and values. With `tensors` the
        engine uses another module's parameters: a policy that it loads must be what they hold.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self._dtype = dtype
        self._cache_bytes_max = cache_bytes_max
        self._model = CausalModel(folder, dtype=dtype, device=device, tensors=tensors)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers-engine")
        self._loaded, self._version = False, -1
        self._updates: deque[_Update] = deque()

    @property
    def info(self) -> EngineInfo:
        """Name, version, arithmetic and device."""
        device = self._model.device.type
        return EngineInfo(name="transformers", version=transformers.__version__, dtype=self._dtype, device=device)

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Load a policy and check it on the probe. Raises EngineMismatch."""
        await self._in_thread(lambda _: self._load(weights, policy_version))

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        """Sample in the engine's thread. Cancelling it stops at the next token."""
        return await self._in_thread(lambda stop: self._generate(requests, sampling, stop))

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        """Score completions with one forward pass per batch."""
        return await self._in_thread(lambda stop: self._prefill(requests, sampling, stop))

    async def prefill_mixed(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        policies: Mapping[int, Weights],
    ) -> Prefill:
        """Score completions that span several policies, loading each policy once."""
        return await self._in_thread(lambda stop: self._prefill_mixed(requests, spans, sampling, policies, stop))

    @property
    def swaps(self) -> frozenset[SwapPolicy]:
        return frozenset(swap for swap in SwapPolicy if swap.spans_policies)

    async def update(self, weights: Weights, *, policy_version: int, swap: SwapPolicy) -> None:
        update = _Update(weights, policy_version, swap)
        self._updates.append(update)
        self._thread.submit(self._apply_updates)  # runs if the engine is idle, or if the current call ends first
        await asyncio.wrap_future(update.done)

    def set_threads(self, threads: int) -> None:
        """Change torch's threads, once the call in progress has ended: they belong to the engine's own thread."""
        self._thread.submit(torch.set_num_threads, threads)

    async def close(self) -> None:
        """End the engine's thread."""
        await asyncio.to_thread(self._thread.shutdown)

    async def _in_thread(self, work: Callable[[threading.Event], T]) -> T:
        stop = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, stop)
        except asyncio.CancelledError:
            stop.set()
            raise

    @torch.inference_mode()
    def _load(self, weights: Weights, policy_version: int) -> None:
        """Copy the weights, then compare this engine's own path (shared prefixes, cache, padding) with the plain forward pass.

        This verifies that the weights are loaded and that the path is correct for this architecture.
        """
        self._model.require_fit(weights)
        self._loaded = False
        self.copy_weights(weights)
        probe = probe_requests(self._model.vocab_size)
        found_T = self._score(strung(probe), PROBE_SAMPLING).logprobs_T
        pairs = [(request.prompt_token_ids, request.completion_token_ids) for request in probe]
        expected_T, _ = reference_scores(self._model, weights, pairs)
        error = float((found_T - expected_T).abs().max())
        if not error <= PROBE_ERROR_MAX[self._dtype]:  # also raised for NaN
            raise EngineMismatch(
                f"policy {policy_version}: logprobs on the probe are {error:.3g} nats off the plain forward pass; "
                "this engine computes nothing until a load succeeds"
            )
        self._loaded, self._version = True, policy_version

    def _apply_updates(self) -> SwapPolicy | None:
        """Swap to the newest queued policy, if any, and return what happens to keys and values."""
        popped = [self._updates.popleft() for _ in range(len(self._updates))]
        waiting = [update for update in popped if update.done.set_running_or_notify_cancel()]
        if not waiting:
            return None
        try:
            self._load(waiting[-1].weights, waiting[-1].policy_version)
        except BaseException as error:
            for update in waiting:
                update.done.set_exception(error)
            raise
        for update in waiting:
            update.done.set_result(None)
        return waiting[-1].swap

    def copy_weights(self, weights: Weights) -> None:
        """Copy a policy's weights into the model."""
        self._model.load(weights)

    @torch.inference_mode()
    def _generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling, stop: threading.Event
    ) -> list[Completion]:
        assert self._loaded, "no weights have been loaded"
        completions: dict[int, Completion] = {}
        asked_of = self._version
        sizes = [(request.prompt_token_ids, sampling.completion_tokens_max) for request in requests]
        self._require_memory(max((len(prompt) for prompt, _ in sizes), default=0), sampling.completion_tokens_max)
        for batch in self._batches(sizes):
            drafts = self._sample([requests[i] for i in batch], sampling, stop)
            completions.update(zip(batch, (draft.completion(asked_of) for draft in drafts), strict=True))
        return [completions[i] for i in range(len(requests))]

    def _sample(self, requests: Sequence[GenerateRequest], sampling: Sampling, stop: threading.Event) -> list[_Draft]:
        """Sample one batch, one token of every completion at a time."""
        stops = set(sampling.stop_token_ids)
        drafts = [_Draft(request.prompt_token_ids, request.seed, stops) for request in requests]
        kept = HiddenRows() if any(request.proofs for request in requests) else None
        prompts, prompt_of_B = self._distinct([request.prompt_token_ids for request in requests])
        rows, hidden_PH = self._model.begin(prompts, spare=sampling.completion_tokens_max)
        hidden_BH = hidden_PH[prompt_of_B]
        active = drafts  # one per row of hidden states
        for position in range(sampling.completion_tokens_max):
            if stop.is_set():
                raise _Stopped
            if kept is not None:
                kept.add([None if draft.stopped else id(draft) for draft in active], repeat(position), hidden_BH)
            logits_BV = self._model.logits(hidden_BH)
            scores = score_tokens(logits_BV, [draft.seed for draft in active], [position] * len(active), sampling)
            chosen_B = scores.choice()
            for draft, token, nats in zip(active, chosen_B.tolist(), scores.logprobs(chosen_B).tolist(), strict=True):
                draft.append(token, nats, self._version)
            unfinished = [row for row, draft in enumerate(active) if not draft.stopped]
            if not unfinished or position + 1 == sampling.completion_tokens_max:
                break
            # Selecting rows copies keys and values, so finished rows stay until there are many of them.
            if position == 0 or len(unfinished) <= KEPT_SHARE_MAX * len(active):
                kept_B = torch.tensor(unfinished, device=self._model.device)
                sources_B = prompt_of_B[kept_B] if position == 0 else kept_B
                rows.select(sources_B)
                active, chosen_B = [active[row] for row in unfinished], chosen_B[kept_B]
            swap = self._apply_updates()
            if swap is None or swap is SwapPolicy.KEEP_KV:
                hidden_BH = self._model.extend(rows, chosen_B[:, None])[:, -1]
            else:
                active = [draft for draft in active if not draft.stopped]
                prompts, prompt_of_B = self._distinct([draft.sequence for draft in active])
                rows, hidden_PH = self._model.begin(prompts, spare=sampling.completion_tokens_max - position)
                rows.select(prompt_of_B)
                hidden_BH = hidden_PH[prompt_of_B]
        if kept is not None:
            proofs = kept.take({id(draft): len(draft.token_ids) for draft in drafts})
            for draft in drafts:
                draft.proofs = proofs[id(draft)]
        return drafts

    @torch.inference_mode()
    def _prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling, stop: threading.Event) -> Prefill:
        assert self._loaded, "no weights have been loaded"
        found: dict[int, Judged] = {}
        strings = strung(requests)
        for batch in self._batches([(string.prompt_token_ids, len(string.token_ids)) for string in strings]):
            if stop.is_set():
                raise _Stopped
            judged = self._score([strings[i] for i in batch], sampling)
            found.update(zip(batch, judged.split([len(strings[i].chosen) for i in batch]), strict=True))
        return prefill_of(found[i] for i in range(len(found)))

    @torch.inference_mode()
    def _prefill_mixed(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        policies: Mapping[int, Weights],
        stop: threading.Event,
    ) -> Prefill:
        """Score completions with the same cuts together, policy by policy, so that each policy is loaded once."""
        places: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for place, (request, spans_of_one) in enumerate(zip(requests, spans, strict=True)):
            assert sum(num_tokens for _, num_tokens in spans_of_one) == len(request.completion_token_ids)
            places.setdefault(tuple(spans_of_one), []).append(place)
        mixtures = {cuts: Mixture([requests[place] for place in found]) for cuts, found in places.items()}
        parts: dict[int, list[Judged]] = {place: [] for place in range(len(requests))}
        for version in sorted(policies):
            if stop.is_set():
                raise _Stopped
            self._load(policies[version], version)
            for cuts, mixture in mixtures.items():
                num_tokens = dict(cuts).get(version)
                if num_tokens is not None:
                    found = mixture.score(self._model, num_tokens, sampling)
                    for place, part in zip(places[cuts], found, strict=True):
                        parts[place].append(part)
        return prefill_of(part for place in parts for part in parts[place])

    def _score(self, strings: Sequence[String], sampling: Sampling) -> Judged:
        """Score the completion tokens of one batch, in order."""
        model, tokens = self._model, [string.token_ids for string in strings]
        width = max(map(len, tokens))
        padded_BT = torch.tensor([[*ids, *[0] * (width - len(ids))] for ids in tokens], device=model.device)
        lengths_B = torch.tensor([len(ids) for ids in tokens], device=model.device)
        real_BT = torch.arange(width, device=model.device) < lengths_B[:, None]
        chosen_BT = torch.zeros_like(real_BT)
        for row_T, string in zip(chosen_BT, strings, strict=True):
            row_T[[place for place, _, _ in string.chosen]] = True
        prompts, prompt_of_B = self._distinct([string.prompt_token_ids for string in strings])
        rows, hidden_PH = model.begin(prompts, spare=width)
        hidden_BTH = hidden_PH[prompt_of_B][:, None].repeat(1, width, 1)
        left_B, sources_B, step = torch.arange(len(strings), device=model.device), prompt_of_B, max(16, width // 8)
        for start in range(0, width - 1, step):  # without padding to the longest
            kept_B = (lengths_B[left_B] > start + 1).nonzero()[:, 0]
            rows.select(sources_B[kept_B])
            left_B, sources_B = left_B[kept_B], torch.arange(len(kept_B), device=model.device)
            part = slice(start, min(start + step, width - 1))
            more_BTH = model.extend(rows, padded_BT[left_B, part], real_BT[left_B, part])
            hidden_BTH[left_B, start + 1 : part.stop + 1] = more_BTH
        hidden_NH, chosen_N = hidden_BTH[chosen_BT], padded_BT[chosen_BT]
        seeds = [seed for string in strings for _, seed, _ in string.chosen]
        positions = [position for string in strings for _, _, position in string.chosen]
        return judge_tokens(
            model, hidden_NH, chosen_N, seeds, positions, sampling, keep_hidden=any(string.hidden for string in strings)
        )

    def _batches(self, sizes: Sequence[tuple[tuple[int, ...], int]]) -> Iterator[list[int]]:
        """Yield indices of (prompt, completion length) pairs to process together: equal prompts, then similar lengths."""
        batch: list[int] = []
        longest = 0
        for i in sorted(range(len(sizes)), key=lambda i: (len(sizes[i][0]), sizes[i])):
            prompt, length = sizes[i]
            tokens = len(prompt) + max(longest, length)  # of the widest row: prompts are in order of length
            row_bytes = tokens * (self._model.cache_bytes_per_token + MASK_BYTES * tokens)
            if batch and (len(batch) + 1) * row_bytes > self._cache_bytes_max:
                yield batch
                batch, longest = [], 0
            batch.append(i)
            longest = max(longest, length)
        if batch:
            yield batch

    def _require_memory(self, prompt_tokens: int, completion_tokens_max: int) -> None:
        """Check that one sequence fits: its prompt now, and all of it in an otherwise empty memory.

        Raises LocalError: a run may name any number of tokens, and the system would end other programs too.
        """
        if self._model.device.type != "cpu":  # torch raises an error of its own there
            return
        each, found = self._model.cache_bytes_per_token, memory.machine_memory()
        prompt_bytes = prompt_tokens * (each + MASK_BYTES * prompt_tokens)
        whole_bytes = (prompt_tokens + completion_tokens_max) * each
        for what, needed, held in (
            (f"a prompt of {prompt_tokens:,} tokens", prompt_bytes, found.available),
            (f"a completion of {completion_tokens_max:,} tokens", whole_bytes, found.total),
        ):
            if held is not None and needed > held:
                raise LocalError(
                    f"{what} needs {needed / 2**30:,.1f} GiB of memory, and this machine has {held / 2**30:,.1f} GiB for it; "
                    "this run needs a larger machine or a GPU"
                )

    def _distinct(self, prompts: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], Tensor]:
        """Return the different prompts, and for each of B prompts the index of its own."""
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(prompts))}
        return list(places), torch.tensor([places[prompt] for prompt in prompts], device=self._model.device)


class _Stopped(Exception):
    """The caller was cancelled and no longer waits."""


@dataclass
class _Draft:
    """Unfinished completion."""

    prompt_token_ids: tuple[int, ...]
    seed: int
    stops: set[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Counter[int] = field(default_factory=Counter)
    """Policy version -> tokens, in the order of the policies."""
    stopped: bool = False
    proofs: bytes = b""

    @property
    def sequence(self) -> tuple[int, ...]:
        return (*self.prompt_token_ids, *self.token_ids)

    def append(self, token: int, nats: float, policy_version: int) -> None:
        """Append a token, unless the draft has stopped: its row stays in the batch for a while, and its tokens are ignored."""
        if not self.stopped:
            self.token_ids.append(token)
            self.logprobs.append(nats)
            self.versions[policy_version] += 1
            self.stopped = token in self.stops

    def completion(self, asked_of: int) -> Completion:
        """Return the completion, with its spans unless the requested policy sampled all of it."""
        finish = FinishReason.STOP if self.stopped else FinishReason.LENGTH
        spans = () if set(self.versions) == {asked_of} else tuple(self.versions.items())
        return Completion(tuple(self.token_ids), tuple(self.logprobs), finish, spans, self.proofs)


@dataclass
class _Update:
    """Weights queued for the next token."""

    weights: Weights
    policy_version: int
    swap: SwapPolicy
    done: Future[None] = field(default_factory=Future)


def probe_requests(vocab_size: int) -> list[ScoreRequest]:
    """Return fixed sequences to probe a load. Their prompts share a prefix; prompts and completions differ in length."""
    ids = [(7 * i * i + 13 * i + 5) % vocab_size for i in range(40)]
    return [
        ScoreRequest(tuple(ids[:12]), tuple(ids[12:20]), seed=0),
        ScoreRequest(tuple(ids[:9] + ids[20:24]), tuple(ids[24:40]), seed=0),
    ]
