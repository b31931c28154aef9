"""Generate for a lease with multi-turn environments.

Concurrency: every rollout of the lease is an episode of its own; concurrent requests to the model are batched
(envs/episodes.py). An environment is third-party code. An exception ends its episode, and the tokens sampled before it
count, because a validator's environment may raise at the same place. If it continues there instead, the bundle is
rejected as incomplete, which is no strike. If its process exits, all its episodes fail; each is then played again alone,
so that no lease is handed from worker to worker forever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from prime_node.envs.episodes import BatchingQueue, EpisodeRecorder, again_alone, bounds_of
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import TurnEnvironment
from prime_protocol.assignment import GroupAssignment, Lease
from prime_protocol.rollout import Completion
from prime_protocol.run_spec import RunSpec
from prime_protocol.turns import Turn

log = logging.getLogger(__name__)


Sample = Callable[[list[GenerateRequest]], Awaitable[list[Completion]]]
"""Function that returns an engine's completions of a batch."""


class NothingSampled(Exception):
    """An environment ended an episode before it asked the model for anything."""


async def play_lease(
    lease: Lease,
    spec: RunSpec,
    environments: Mapping[str, TurnEnvironment],
    sample: Sample,
) -> list[list[Turn]]:
    """Return the turns of each rollout, in the lease's order of groups and seeds.

    Raises NothingSampled, and whatever `sample` raises.
    """
    queue, alone = BatchingQueue(sample), asyncio.Lock()
    bounds = bounds_of(spec)
    played = await queue.serving(
        asyncio.gather(
            *(
                _turns(
                    group,
                    environments.get(group.problem.environment),
                    partial(EpisodeRecorder, seed, bounds[group.problem.environment], queue.ask),
                    alone,
                )
                for group in lease.groups
                for seed in group.seeds
            )
        )
    )
    if not all(played):
        raise NothingSampled
    return played


async def _turns(
    group: GroupAssignment,
    environment: TurnEnvironment | None,
    begin: Callable[[], EpisodeRecorder],
    alone: asyncio.Lock,
) -> list[Turn]:
    """Return the turns of one rollout. Its seeds make a second run equal to the first."""
    recorder, problem = begin(), group.problem
    if environment is None:  # single-turn
        await recorder(group.prompt_token_ids)
        return recorder.turns

    async def play() -> float:
        nonlocal recorder
        recorder = begin()
        return await environment.play(problem.index, group.prompt_token_ids, recorder)

    try:
        await again_alone(play, alone)
    except Exception:
        log.warning("environment %s, problem %d: an episode failed", problem.environment, problem.index, exc_info=True)
    return recorder.turns
