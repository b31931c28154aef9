"""The scorer, the policy that it holds, and whose turn it is: a forward pass's, or that of a piece of references.

Who waits for whom: whoever wants the scorer waits for those who came before. None of them waits for anything but the scorer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from prime_node.ports.engine import EngineMismatch, SamplingScorer
from prime_protocol.weights import Weights


class HeldScorer:
    """Loads a policy only where another one is wanted than the last time."""

    def __init__(self, scorer: SamplingScorer) -> None:
        self.version = -1
        """The policy that it holds; -1 where it must be loaded anew."""
        self._scorer = scorer
        self._turn = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, policies: Mapping[int, Weights]) -> AsyncIterator[SamplingScorer]:
        """The scorer for nobody else, holding the policy; of several none, for then each has its part. Raises EngineMismatch."""
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
