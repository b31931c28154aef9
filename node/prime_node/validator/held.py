"""The scorer, its current policy, and a lock: it runs one forward pass or one piece of references at a time.

Concurrency: callers get the scorer in the order of their requests. While they hold it, they wait for nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from prime_node.ports.engine import EngineMismatch, SamplingScorer
from prime_protocol.weights import Weights


class HeldScorer:
    """A scorer that loads a policy only if it differs from the current one."""

    def __init__(self, scorer: SamplingScorer) -> None:
        self.version = -1
        """Policy that it holds; -1 if it must be loaded again."""
        self._scorer = scorer
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, policies: Mapping[int, Weights]) -> AsyncIterator[SamplingScorer]:
        """Hold the scorer exclusively, with the policy loaded.

        With several policies none is preloaded: each forwards its own part later. Raises EngineMismatch.
        """
        async with self._turn:
            try:
                await self._hold(policies)
                yield self._scorer
            except EngineMismatch:
                self.version = -1
                raise

    async def _hold(self, policies: Mapping[int, Weights]) -> None:
        if len(policies) == 1 and self.version in policies:
            return
        self.version = -1
        if len(policies) == 1:
            ((version, weights),) = policies.items()
            await self._scorer.load(weights, policy_version=version)
            self.version = version
