"""Engines for runs whose policies are adapters: they load the base with the adapters merged into it.

The engines behind them, vLLM or transformers, therefore use one set of weights, check it with their own probe, and need no
support for adapters. Merging runs in a thread. The base's files are memory-mapped, and only adapted tensors are copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from prime_node.ports.engine import (
    BatchingEngine,
    Engine,
    GenerateRequest,
    SamplingScorer,
    ScoreRequest,
    Spans,
    SwappingEngine,
    ThreadedEngine,
)
from prime_protocol.adapters import AdapterMismatch, AdapterSpec, merged
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, EngineInfo
from prime_protocol.schedule import SwapPolicy
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

_Inner = TypeVar("_Inner", bound=Engine)


class _Merging(Generic[_Inner]):
    """What an engine and a scorer around another one have in common. It is the inner one's, but for the weights."""

    def __init__(self, inner: _Inner, base: Weights, spec: AdapterSpec) -> None:
        self._inner = inner
        self._base = base
        self._spec = spec

    @property
    def info(self) -> EngineInfo:
        """Description of the inner engine."""
        return self._inner.info

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Merge the adapters into the base, and load the result."""
        await self._inner.load(await self._whole(weights), policy_version=policy_version)

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        """Sample with the inner engine."""
        return await self._inner.generate(requests, sampling)

    async def close(self) -> None:
        """Close the inner engine."""
        await self._inner.close()

    async def _whole(self, adapters: Weights) -> Weights:
        try:
            return await asyncio.to_thread(merged, self._base, adapters, self._spec)
        except AdapterMismatch as error:
            raise LocalError(
                f"a policy of this run is not of its adapters ({error}): report it to the operator"
            ) from None


class MergingEngine(_Merging[Engine]):
    """Implementation of ports.engine.SwappingEngine and BatchingEngine around another engine. It can what that one can."""

    @property
    def batches(self) -> bool:
        """Return whether the inner engine does."""
        return isinstance(self._inner, BatchingEngine) and self._inner.batches

    async def wait_for_room(self) -> None:
        """Wait for room in the inner engine."""
        assert isinstance(self._inner, BatchingEngine)
        await self._inner.wait_for_room()

    @property
    def swaps(self) -> frozenset[SwapPolicy]:
        """Swaps of the inner engine; empty if it has none."""
        return self._inner.swaps if isinstance(self._inner, SwappingEngine) else frozenset()

    async def update(self, weights: Weights, *, policy_version: int, swap: SwapPolicy) -> None:
        """Merge the adapters into the base, and swap to the result."""
        assert isinstance(self._inner, SwappingEngine)
        await self._inner.update(await self._whole(weights), policy_version=policy_version, swap=swap)

    def set_threads(self, threads: int) -> None:
        """Change the threads of the inner engine, if they can change."""
        if isinstance(self._inner, ThreadedEngine):
            self._inner.set_threads(threads)


class MergingScorer(_Merging[SamplingScorer]):
    """Implementation of ports.engine.SamplingScorer around another scorer."""

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        """Score with the inner scorer."""
        return await self._inner.prefill(requests, sampling)

    async def prefill_mixed(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        policies: Mapping[int, Weights],
    ) -> Prefill:
        """Merge each policy into the base, and score with the inner scorer."""
        whole = {version: await self._whole(weights) for version, weights in policies.items()}
        return await self._inner.prefill_mixed(requests, spans, sampling, whole)
