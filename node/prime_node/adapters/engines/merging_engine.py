"""Engines for runs whose policies are adapters: they load the base with the adapters merged into it.

The engines behind them, vLLM or transformers, therefore use one set of weights, check it with their own probe, and need no
support for adapters. Merging runs in a thread. The base's files are memory-mapped, and only adapted tensors are copied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

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


class _Merging:
    def __init__(self, base: Weights, spec: AdapterSpec) -> None:
        self._base = base
        self._spec = spec

    async def _whole(self, adapters: Weights) -> Weights:
        try:
            return await asyncio.to_thread(merged, self._base, adapters, self._spec)
        except AdapterMismatch as error:
            raise LocalError(
                f"a policy of this run is not of its adapters ({error}): report it to the operator"
            ) from None


class MergingEngine(_Merging):
    """Implementation of ports.engine.SwappingEngine and BatchingEngine around another engine. It can what that one can."""

    def __init__(self, engine: Engine, base: Weights, spec: AdapterSpec) -> None:
        super().__init__(base, spec)
        self._engine = engine

    @property
    def info(self) -> EngineInfo:
        """Description of the inner engine."""
        return self._engine.info

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Merge the adapters into the base, and load the result."""
        await self._engine.load(await self._whole(weights), policy_version=policy_version)

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        """Sample with the inner engine."""
        return await self._engine.generate(requests, sampling)

    @property
    def batches(self) -> bool:
        """Return whether the inner engine does."""
        return isinstance(self._engine, BatchingEngine) and self._engine.batches

    async def wait_for_room(self) -> None:
        """Wait for room in the inner engine."""
        assert isinstance(self._engine, BatchingEngine)
        await self._engine.wait_for_room()

    @property
    def swaps(self) -> frozenset[SwapPolicy]:
        """Swaps of the inner engine; empty if it has none."""
        return self._engine.swaps if isinstance(self._engine, SwappingEngine) else frozenset()

    async def update(self, weights: Weights, *, policy_version: int, swap: SwapPolicy) -> None:
        """Merge the adapters into the base, and swap to the result."""
        assert isinstance(self._engine, SwappingEngine)
        await self._engine.update(await self._whole(weights), policy_version=policy_version, swap=swap)

    def set_threads(self, threads: int) -> None:
        """Change the threads of the inner engine, if they can change."""
        if isinstance(self._engine, ThreadedEngine):
            self._engine.set_threads(threads)

    async def close(self) -> None:
        """Close the inner engine."""
        await self._engine.close()


class MergingScorer(_Merging):
    """Implementation of ports.engine.SamplingScorer around another scorer."""

    def __init__(self, scorer: SamplingScorer, base: Weights, spec: AdapterSpec) -> None:
        super().__init__(base, spec)
        self._scorer = scorer

    @property
    def info(self) -> EngineInfo:
        """Description of the inner scorer."""
        return self._scorer.info

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        """Merge the adapters into the base, and load the result."""
        await self._scorer.load(await self._whole(weights), policy_version=policy_version)

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        """Sample with the inner scorer."""
        return await self._scorer.generate(requests, sampling)

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        """Score with the inner scorer."""
        return await self._scorer.prefill(requests, sampling)

    async def prefill_mixed(
        self,
        requests: Sequence[ScoreRequest],
        spans: Sequence[Spans],
        sampling: Sampling,
        policies: Mapping[int, Weights],
    ) -> Prefill:
        """Merge each policy into the base, and score with the inner scorer."""
        whole = {version: await self._whole(weights) for version, weights in policies.items()}
        return await self._scorer.prefill_mixed(requests, spans, sampling, whole)

    async def close(self) -> None:
        """Close the inner scorer."""
        await self._scorer.close()
