"""Engines that compute several calls side by side, each until the test releases it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.node.table_engine import TableEngine

from prime_node.ports.engine import EngineMismatch, GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import Completion
from prime_protocol.schedule import SwapPolicy
from prime_protocol.weights import Weights

LEASE = 8
"""Completions of a lease of the coordinator in memory."""


class Together(TableEngine):
    """Engine that computes several calls side by side, each until it is released; the rehearsal's at once."""

    batches = True

    def __init__(self, sequences_max: int) -> None:
        super().__init__()
        self.calls: list[asyncio.Event] = []
        self.open = False
        self._sequences_max, self._unfinished = sequences_max, 0
        self._changed = asyncio.Event()

    async def wait_for_room(self) -> None:
        while self._unfinished >= self._sequences_max:
            self._changed.clear()
            await self._changed.wait()

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        if requests[0].seed == 0 and not self.calls and len(requests) != LEASE:  # the rehearsal
            return await super().generate(requests, sampling)
        released = asyncio.Event()
        self.calls.append(released)
        self._unfinished += len(requests)
        try:
            if not self.open:
                await released.wait()
            return await super().generate(requests, sampling)
        finally:
            self._unfinished -= len(requests)
            self._changed.set()

    def release_all(self) -> None:
        self.open = True
        for call in self.calls:
            call.set()


class SwappingTogether(Together):
    swaps = frozenset({SwapPolicy.KEEP_KV})

    def __init__(self, sequences_max: int, *, fails: bool = False) -> None:
        super().__init__(sequences_max)
        self.updates: list[int] = []
        self.fails = fails

    async def update(self, weights: Weights, *, policy_version: int, swap: SwapPolicy) -> None:
        self.updates.append(policy_version)
        if self.fails:
            self.fails = False
            raise EngineMismatch("the probe has other logprobs")
        await super().load(weights, policy_version=policy_version)
