"""Generate for one lease while newer policies arrive.

Concurrency: the engine generates. If the run's schedule swaps policies during generation, a second task waits for the
follower's next policy and passes it to the engine. Whichever finishes first wakes `generate`; cancelling ends both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from prime_node.ports.engine import Engine, EngineMismatch, GenerateRequest, SwappingEngine
from prime_node.worker.episodes import NothingSampled, Sample
from prime_node.worker.leases import requests_for
from prime_protocol.assignment import Lease
from prime_protocol.rollout import Completion, Rollouts, rollouts_for
from prime_protocol.schedule import SwapPolicy
from prime_protocol.turns import Turn, rollouts_of_turns
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)

Play = Callable[[Lease, Sample], Awaitable[list[list[Turn]]]]
"""Function like episodes.play_lease, bound to the run's environments."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Outcome of a lease."""

    rollouts: Rollouts | None
    """Rollouts; None if the lease is to be handed back."""
    held: int
    """Policy that the engine holds now; -1 if it must be loaded again."""
    failed: bool = False
    """Whether an environment asked the model for nothing."""


async def generate(
    engine: Engine,
    lease: Lease,
    swap: SwapPolicy,
    *,
    held: int,
    proofs: bool = False,
    wait_newer: Callable[[int], Coroutine[Any, Any, tuple[int, Weights]]],
    play: Play | None = None,
    timed: Callable[[int], AbstractContextManager[None]] = lambda version: nullcontext(),
) -> Generated:
    """Generate the lease's rollouts.

    `wait_newer` returns the next policy after a version, and its weights; `timed` wraps a swap to it. `proofs`: whether
    completions commit to their hidden states. `play`: makes the turns of each rollout from a function that samples a
    batch, if the run has multi-turn environments. An engine that cannot swap as the run wants drains: a completion may
    span policies, but need not.
    """
    swapping = engine if isinstance(engine, SwappingEngine) and swap in engine.swaps else None
    policy = _Held(engine, lease, held, proofs)
    generating = asyncio.create_task(_rollouts(policy, lease, play))
    newer: asyncio.Task[tuple[int, Weights]] | None = None
    try:
        while swapping is not None or swap is SwapPolicy.ABORT_AND_REQUEUE:
            newer = asyncio.create_task(wait_newer(policy.version))
            both: set[asyncio.Future[Any]] = {generating, newer}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if generating.done():
                break
            version, weights = newer.result()
            if swapping is None:
                log.info("policy %d is published: handing the lease back", version)
                return Generated(None, policy.version)
            async with policy.border:
                with timed(version):
                    await swapping.update(weights, policy_version=version, swap=swap)
                policy.version = version
        rollouts = await generating
        return Generated(rollouts, policy.version, failed=rollouts is None)
    except EngineMismatch as error:
        log.error("loading a policy into the engine failed: %s; handing the lease back", error)
        return Generated(None, -1)
    finally:
        tasks = [task for task in (generating, newer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class _Held:
    """The current policy, and batches sampled from it."""

    engine: Engine
    lease: Lease
    version: int
    proofs: bool
    border: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock held by a swap, and while a batch starts, so that a batch knows its first policy."""

    async def sample(self, requests: list[GenerateRequest]) -> list[Completion]:
        async with self.border:
            begun_on = self.version
            asked = [replace(request, proofs=self.proofs) for request in requests]
            sampling = asyncio.ensure_future(self.engine.generate(asked, self.lease.sampling))
            await asyncio.sleep(0)
        completions = await sampling
        if begun_on == self.lease.policy_version:
            return completions
        return [each if each.spans else _spanning(each, begun_on) for each in completions]


async def _rollouts(policy: _Held, lease: Lease, play: Play | None) -> Rollouts | None:
    if play is None:
        return rollouts_for(lease, await policy.sample(requests_for(lease)))
    try:
        return rollouts_of_turns(lease, await play(lease, policy.sample))
    except NothingSampled:
        log.warning("an environment requested no completion; handing the lease back")
        return None


def _spanning(completion: Completion, policy_version: int) -> Completion:
    return replace(completion, spans=((policy_version, len(completion.token_ids)),))
