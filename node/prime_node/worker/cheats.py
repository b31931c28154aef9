"""A worker's engine that cheats on purpose, to see the checks at work: `prime-node join --unsafe-cheat`.

This module holds the cheats that a command can ask for. `lab/prime_lab/adversaries/` adds those that need more than one
worker's engine, for tests and benchmarks.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from prime_node.ports.engine import Engine, GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.proof import PROOF_BYTES, num_proofs
from prime_protocol.rollout import Completion, EngineInfo, FinishReason
from prime_protocol.weights import Weights, WeightTensor

log = logging.getLogger(__name__)

Floats = npt.NDArray[np.float32]

SEEN_MAX = 16
"""Number of policies that a cheat remembers."""
NOISE_SHARE = 0.1
"""Noise relative to a tensor's own standard deviation."""
INT4_GROUP = 32
"""Values that share a scale."""


@dataclass
class CheatMemory:
    """State that a cheat keeps from one request to the next."""

    seen: list[Weights] = field(default_factory=list)
    """Policies that it was given, oldest first."""
    kept: Weights | None = None
    """Policy that it never swaps."""
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))


M = TypeVar("M", bound=CheatMemory)


class DishonestEngine(Generic[M]):
    """Implementation of ports.engine.Engine that cheats. It reports the right policy, as a real cheat would."""

    def __init__(
        self,
        engine: Engine,
        memory: M,
        *,
        weights: Callable[[M], Weights] | None = None,
        answer: Callable[[Engine, Sequence[GenerateRequest], Sampling, M], Awaitable[list[Completion]]] | None = None,
        honest_loads: int = 0,
    ) -> None:
        """Wrap an engine.

        `weights` chooses the weights to load instead of the policy, which is `memory.seen[-1]`. `answer` returns
        completions for the requests, by any means. `honest_loads`: number of policies that it serves honestly first.
        """
        self._engine = engine
        self._memory = memory
        self._weights = weights
        self._answer = answer
        self._honest_loads = honest_loads
        self._loads = 0
        log.warning("this worker cheats on purpose: the run will detect it and ban its key")

    @property
    def info(self) -> EngineInfo:
        """Return the real engine."""
        return self._engine.info

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Load the weights that the cheat chooses instead."""
        self._memory.seen.append(weights)
        del self._memory.seen[:-SEEN_MAX]
        self._loads += 1
        if self._weights is not None and self._cheats:
            weights = self._weights(self._memory)
        await self._engine.load(weights, policy_version=policy_version)

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        """Answer by the cheat's function, once it has begun to cheat."""
        if self._answer is None or not self._cheats:
            return await self._engine.generate(requests, sampling)
        return await self._answer(self._engine, requests, sampling, self._memory)

    async def close(self) -> None:
        """Close the real engine."""
        await self._engine.close()

    @property
    def _cheats(self) -> bool:
        return self._loads > self._honest_loads


def older(steps: int) -> Callable[[CheatMemory], Weights]:
    """Load the policy of `steps` steps before."""
    return lambda memory: memory.seen[max(0, len(memory.seen) - 1 - steps)]


def first(memory: CheatMemory) -> Weights:
    """Keep the first policy of the cheat forever: it saves the downloads."""
    memory.kept = memory.kept or memory.seen[-1]
    return memory.kept


def noisy(memory: CheatMemory) -> Weights:
    """Add Gaussian noise of a tenth of each tensor's own spread: what a broken or hostile machine may hold."""
    return mapped(
        memory.seen[-1], lambda values: values + memory.rng.normal(0.0, NOISE_SHARE * values.std(), values.shape)
    )


def int8(memory: CheatMemory) -> Weights:
    """Round to 8 bits, with a scale for each row: half the memory."""
    return mapped(memory.seen[-1], lambda values: quantised(values, group=values.shape[-1], largest=127))


def int4(memory: CheatMemory) -> Weights:
    """Round to 4 bits, with a scale for each 32 values: a quarter of the memory."""
    return mapped(memory.seen[-1], lambda values: quantised(values, group=INT4_GROUP, largest=7))


async def forged_seed(
    engine: Engine, requests: Sequence[GenerateRequest], sampling: Sampling, memory: CheatMemory
) -> list[Completion]:
    """Sample with randomness of its own instead of the assigned seed."""
    return await engine.generate([replace(one, seed=one.seed ^ 1) for one in requests], sampling)


async def truncated(
    engine: Engine, requests: Sequence[GenerateRequest], sampling: Sampling, memory: CheatMemory
) -> list[Completion]:
    """Send only the first half, to finish sooner."""
    completions = await engine.generate(requests, sampling)
    return [cut_completion(one, max(1, len(one.token_ids) // 2)) for one in completions]


CHEATS_BY_WEIGHTS: dict[str, Callable[[CheatMemory], Weights]] = {
    "altered": noisy,
    "stale": first,
    "older-1": older(1),
    "older-2": older(2),
    "older-8": older(8),
    "int8": int8,
    "int4": int4,
}
CHEATS_BY_ANSWER = {"forged-seed": forged_seed, "truncated": truncated}
STANDALONE = (*CHEATS_BY_WEIGHTS, *CHEATS_BY_ANSWER)
"""Cheats that need only a worker's own engine, of any kind."""


def cheating_engine(engine: Engine, cheat: str, *, honest_loads: int) -> Engine:
    """Return a cheating engine for demonstrations. Raises LocalError if the cheat is unknown."""
    if cheat not in STANDALONE:
        raise LocalError(f"--unsafe-cheat {cheat}: unknown; choose one of {', '.join(STANDALONE)}")
    weights, answer = CHEATS_BY_WEIGHTS.get(cheat), CHEATS_BY_ANSWER.get(cheat)
    return DishonestEngine(engine, CheatMemory(), weights=weights, answer=answer, honest_loads=honest_loads)


def quantised(values: Floats, *, group: int, largest: int) -> Floats:
    """Round matrices to 2 * largest + 1 levels for each group of values; vectors, which are small, stay."""
    if values.ndim < 2 or values.size % group:
        return values
    rows = values.reshape(-1, group)
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-12) / largest
    found: Floats = (np.round(rows / scales) * scales).reshape(values.shape)
    return found


def mapped(weights: Weights, change: Callable[[Floats], npt.NDArray[np.floating]]) -> dict[str, WeightTensor]:
    """Return new weights with every bf16 and fp32 tensor changed, and the others as they are."""
    return {name: _mapped(tensor, change) for name, tensor in weights.items()}


def _mapped(tensor: WeightTensor, change: Callable[[Floats], npt.NDArray[np.floating]]) -> WeightTensor:
    if tensor.dtype not in ("bf16", "fp32") or not tensor.data.size:
        return tensor
    words = tensor.data.astype(np.uint32) << 16 if tensor.dtype == "bf16" else tensor.data
    values = change(words.view(np.float32).reshape(tensor.shape)).astype(np.float32).reshape(-1)
    words = values.view(np.uint32)
    if tensor.dtype == "bf16":
        words = (words + 0x8000) >> 16  # to nearest; a tie does not matter to a cheat
    return WeightTensor(tensor.dtype, tensor.shape, words.astype(tensor.data.dtype))


def cut_completion(completion: Completion, num_tokens: int) -> Completion:
    """Return the first tokens of a completion, as if the length had ended it."""
    kept = completion.token_ids[:num_tokens], completion.logprobs[:num_tokens]
    return Completion(*kept, FinishReason.LENGTH, proofs=completion.proofs[: PROOF_BYTES * num_proofs([num_tokens])])
