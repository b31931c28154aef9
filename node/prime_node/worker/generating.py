"""Generating for one lease while newer policies arrive.

Who waits for whom: the engine works; beside it, where the run's schedule swaps policies under way, we wait for the follower's
next policy and hand it to the engine. Whichever comes first wakes us; cancelling ends both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from prime_node.ports.engine import Engine, EngineMismatch, SwappingEngine
from prime_node.worker.leases import requests_for
from prime_protocol.assignment import Lease
from prime_protocol.rollout import Completion
from prime_protocol.schedule import SwapPolicy
from prime_protocol.weights import Weights

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generated:
    """What became of a lease."""

    completions: list[Completion] | None
    """None: it is to be handed back."""
    held: int
    """The policy that the engine holds now; -1 where it must be loaded anew."""


async def generate(
    engine: Engine,
    lease: Lease,
    swap: SwapPolicy,
    *,
    held: int,
    proofs: bool = False,
    wait_newer: Callable[[int], Coroutine[Any, Any, tuple[int, Weights]]],
    timed: Callable[[int], AbstractContextManager[None]] = lambda version: nullcontext(),
) -> Generated:
    """The lease's completions. `wait_newer` gives the next policy after a version, and its weights; a swap to it is `timed`.

    `proofs`: whether completions commit to their hidden states. An engine that cannot swap under way as the run wants drains: a
    completion may span policies, it need not.
    """
    begun_on = held
    generating = asyncio.create_task(engine.generate(requests_for(lease, proofs=proofs), lease.sampling))
    swapping = engine if isinstance(engine, SwappingEngine) and swap in engine.swaps else None
    newer: asyncio.Task[tuple[int, Weights]] | None = None
    try:
        while swapping is not None or swap is SwapPolicy.ABORT_AND_REQUEUE:
            newer = asyncio.create_task(wait_newer(held))
            both: set[asyncio.Future[Any]] = {generating, newer}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if generating.done():
                break
            version, weights = newer.result()
            if swapping is None:
                log.info("policy %d is out: handing the lease back", version)
                return Generated(None, held)
            with timed(version):
                await swapping.update(weights, policy_version=version, swap=swap)
            held = version
        completions = await generating
        if begun_on != lease.policy_version:  # a lease that waited its turn is begun on what the engine holds by then
            completions = [each if each.spans else _spanning(each, begun_on) for each in completions]
        return Generated(completions, held)
    except EngineMismatch as error:
        log.error("swap under way: %s; the lease is handed back", error)
        return Generated(None, -1)
    finally:
        tasks = [task for task in (generating, newer) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _spanning(completion: Completion, policy_version: int) -> Completion:
    return replace(completion, spans=((policy_version, len(completion.token_ids)),))
