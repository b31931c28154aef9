"""Engine and Scorer on transformers: for machines without vLLM, for validators, and to check other engines against.

All work runs in one thread of its own, one call after another, so the event loop lives on. A cancelled `generate` tells
that thread to stop at the next token; the next call waits for it.

Letters: B completions, P different prompts, N positions to choose a token at, H hidden size, V vocabulary.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import log_softmax

from prime_node.adapters.causal_model import CausalModel
from prime_node.adapters.torch_noise import gumbel_noise
from prime_node.ports.engine import EngineMismatch, GenerateRequest, ScoreRequest
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import Completion, EngineInfo, FinishReason
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

T = TypeVar("T")

PROBE_ERROR_MAX = {"fp32": 2e-3, "bf16": 0.15}
"""Nats. Largest difference between the engine and the plain forward pass on the probe, for each arithmetic."""
LOGITS_BLOCK = 2**24
"""Elements of logits that are held at a time: 64 MiB of float32."""


class TransformersEngine:
    """Implements ports.engine.Engine and ports.engine.Scorer."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str = "fp32",
        device: str = "cpu",
        threads: int | None = None,
        cache_bytes_max: int = 2**30,
    ) -> None:
        """`threads` sets torch's threads for this process. `cache_bytes_max` bounds the keys and values of one batch."""
        if threads is not None:
            torch.set_num_threads(threads)
        self._dtype = dtype
        self._cache_bytes_max = cache_bytes_max
        self._model = CausalModel(folder, dtype=dtype, device=device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="transformers-engine")
        self._loaded = False

    @property
    def info(self) -> EngineInfo:
        device = self._model.device.type
        return EngineInfo(name="transformers", version=transformers.__version__, dtype=self._dtype, device=device)

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        await self._in_thread(lambda _: self._load(weights, policy_version))

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        return await self._in_thread(lambda stop: self._generate(requests, sampling, stop))

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        return await self._in_thread(lambda stop: self._prefill(requests, sampling, stop))

    async def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _in_thread(self, work: Callable[[threading.Event], T]) -> T:
        stop = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, stop)
        except asyncio.CancelledError:
            stop.set()
            raise

    @torch.inference_mode()
    def _load(self, weights: Weights, policy_version: int) -> None:
        """Copy, then compare this engine's own path (shared prefixes, cache, padding) with the plain forward pass.

        That establishes that the weights are in place and that the path is sound for this architecture. Weights that
        differ from the old ones by less than the tolerance moves cannot be told from them by logprobs.
        """
        self._loaded = False
        self._copy_weights(weights)
        self._loaded = True
        error = self._probe_error(weights)
        if not error <= PROBE_ERROR_MAX[self._dtype]:  # NaN as well
            self._loaded = False
            raise EngineMismatch(
                f"policy {policy_version}: logprobs on the probe are {error:.3g} nats off the plain forward pass; "
                "this engine must not be used until another load succeeds"
            )

    def _copy_weights(self, weights: Weights) -> None:
        self._model.load(weights)

    def _probe_error(self, weights: Weights) -> float:
        """Largest difference in nats between `_prefill` and the plain forward pass."""
        probe = probe_requests(self._model.vocab_size)
        greedy = Sampling(temperature=0.0, completion_tokens_max=1, stop_token_ids=())
        found = self._prefill(probe, greedy, threading.Event()).logprobs_T
        expected = [
            self._model.reference_logprobs(weights, r.prompt_token_ids + r.completion_token_ids)[
                -len(r.completion_token_ids) :
            ]
            for r in probe
        ]
        return float(np.abs(found - torch.cat(expected).cpu().numpy()).max())

    @torch.inference_mode()
    def _generate(
        self, requests: Sequence[GenerateRequest], sampling: Sampling, stop: threading.Event
    ) -> list[Completion]:
        assert self._loaded, "no weights have been loaded"
        completions: dict[int, Completion] = {}
        prompts = [request.prompt_token_ids for request in requests]
        lengths = [sampling.completion_tokens_max] * len(requests)
        for batch in self._batches(prompts, lengths):
            tokens, logprobs = self._sample([requests[i] for i in batch], sampling, stop)
            for i, token_ids, nats in zip(batch, tokens, logprobs, strict=True):
                stopped = token_ids[-1] in sampling.stop_token_ids
                finish = FinishReason.STOP if stopped else FinishReason.LENGTH
                completions[i] = Completion(tuple(token_ids), tuple(nats), finish)
        return [completions[i] for i in range(len(requests))]

    def _sample(
        self, requests: Sequence[GenerateRequest], sampling: Sampling, stop: threading.Event
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Token ids and logprobs of one batch, a token of every unfinished completion at a time."""
        tokens: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        prompts, row_of = _distinct([request.prompt_token_ids for request in requests])
        stops = set(sampling.stop_token_ids)
        rows, hidden_PH = self._model.begin(prompts, spare=sampling.completion_tokens_max)
        logits_BV = self._model.logits(hidden_PH)[row_of]
        active = list(range(len(requests)))  # the request that each row of the cache belongs to
        source = row_of  # where the active rows are in the cache
        for position in range(sampling.completion_tokens_max):
            if stop.is_set():
                raise asyncio.CancelledError
            scaled_BV, noisy_BV = _scores(logits_BV, [requests[i].seed for i in active], position, sampling)
            chosen_B = noisy_BV.argmax(dim=1)
            nats_B = log_softmax(scaled_BV, dim=1).gather(1, chosen_B[:, None])[:, 0]
            kept: list[int] = []
            for row, (i, token, nats) in enumerate(zip(active, chosen_B.tolist(), nats_B.tolist(), strict=True)):
                if not tokens[i] or tokens[i][-1] not in stops:
                    tokens[i].append(token)
                    logprobs[i].append(nats)
                if tokens[i][-1] not in stops:
                    kept.append(row)
            if not kept or position == sampling.completion_tokens_max - 1:
                break
            # Dropping rows copies the others' keys and values, which pays when many have finished.
            if position == 0 or len(kept) <= len(active) * KEEP_SHARE:
                keep_B = torch.tensor(kept, device=self._model.device)
                rows.select(source[keep_B], spare=sampling.completion_tokens_max - position)
                active, chosen_B = [active[row] for row in kept], chosen_B[keep_B]
            source = torch.arange(len(active), device=self._model.device)
            logits_BV = self._model.logits(self._model.extend(rows, chosen_B[:, None])[:, -1])
        return tokens, logprobs
