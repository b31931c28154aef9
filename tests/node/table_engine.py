"""The smallest real language model: the next token depends on the last one, by a table of logits.

It samples with the assigned noise and gives the logprobs that it sampled with, so everything about seeds, logprobs and checks
holds for it as for a large model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import numpy.typing as npt

from prime_node.ports.engine import Engine, EngineMismatch, GenerateRequest
from prime_node.worker.worker import Equipment
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.noise import gumbel_noise
from prime_protocol.rollout import Completion, EngineInfo, FinishReason, Rollouts
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights, WeightTensor

VOCAB_SIZE = 16
STOP_TOKEN = 15


def table_weights(seed: int) -> dict[str, WeightTensor]:
    """Return a policy: logits in bf16."""
    table = np.random.default_rng(seed).normal(0.0, 1.5, VOCAB_SIZE * VOCAB_SIZE).astype(np.float32)
    bits = (table.view(np.uint32) >> 16).astype(np.uint16)
    return {"table": WeightTensor("bf16", (VOCAB_SIZE, VOCAB_SIZE), bits)}


def logits_of(weights: Weights) -> npt.NDArray[np.float32]:
    bits = weights["table"].data.astype(np.uint32) << 16
    return bits.view(np.float32).reshape(VOCAB_SIZE, VOCAB_SIZE)


def equipped(engine: Engine) -> Callable[[], Awaitable[Equipment]]:
    """Return a worker's `equip` for an engine that is built already."""

    async def made() -> Equipment:
        return Equipment(engine)

    return made


class TableEngine:
    """Engine that implements ports.engine.Engine."""

    def __init__(self, *, loads_that_fail: int = 0) -> None:
        self.info = EngineInfo(name="table", version="1", dtype="fp32", device="cpu")
        self.loaded: list[int] = []
        self._loads_that_fail = loads_that_fail
        self._logits = np.zeros((VOCAB_SIZE, VOCAB_SIZE), np.float32)

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        if self._loads_that_fail:
            self._loads_that_fail -= 1
            raise EngineMismatch("the probe prompt has other logprobs")
        self._logits = logits_of(weights)
        self.loaded.append(policy_version)

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        return [self._complete(request, sampling) for request in requests]

    async def close(self) -> None:
        pass

    def _complete(self, request: GenerateRequest, sampling: Sampling) -> Completion:
        last = request.prompt_token_ids[-1]
        token_ids: list[int] = []
        logprobs: list[float] = []
        while len(token_ids) < sampling.completion_tokens_max:
            logits = self._logits[last] / sampling.temperature
            noise = gumbel_noise([request.seed], [len(token_ids)], VOCAB_SIZE)[0]
            last = int((logits + noise).argmax())
            token_ids.append(last)
            logprobs.append(float(logits[last] - np.log(np.exp(logits).sum())))
            if last in sampling.stop_token_ids:
                return Completion(tuple(token_ids), tuple(logprobs), FinishReason.STOP)
        return Completion(tuple(token_ids), tuple(logprobs), FinishReason.LENGTH)


def prefill(weights: Weights, lease: Lease, rollouts: Rollouts) -> Prefill:
    """Run the trusted forward pass over a bundle."""
    table = logits_of(weights) / lease.sampling.temperature
    prompts = [group.prompt_token_ids for group in lease.groups for _ in group.seeds]
    logprobs, margins = [], []
    for index, prompt in enumerate(prompts):
        completion = rollouts.completion(index)
        last = prompt[-1]
        for position, token in enumerate(completion.token_ids):
            logits = table[last]
            scores = logits + gumbel_noise([int(rollouts.seeds_N[index])], [position], VOCAB_SIZE)[0]
            logprobs.append(logits[token] - np.log(np.exp(logits).sum()))
            margins.append(scores.max() - scores[token])
            last = token
    return Prefill(np.array(logprobs, np.float32), np.array(margins, np.float32))
