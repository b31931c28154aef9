"""Generating for a lease whose environments answer.

Who waits for whom: every rollout of the lease is an episode of its own; those that ask at the same time are asked together
(envs/episodes.py). An environment is not ours: whatever it raises ends its episode, and what was sampled before counts, for a
validator's may well raise the same there; where it goes on instead, the bundle is refused as incomplete, which is no strike.
Where its process ends, it takes the other episodes along: each is played again by itself, so that none is passed from worker to
worker for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from prime_node.envs.episodes import Desk, EpisodeRecorder, again_alone, bounds_of
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import TurnEnvironment
from prime_protocol.assignment import GroupAssignment, Lease
from prime_protocol.rollout import Completion
from prime_protocol.run_spec import RunSpec
from prime_protocol.turns import Turn

log = logging.getLogger(__name__)


Sample = Callable[[list[GenerateRequest]], Awaitable[list[Completion]]]
"""An engine's answers to a batch."""


class NothingSampled(Exception):
    """An environment ended an episode before it asked the model for anything."""


async def play_lease(
    lease: Lease,
    spec: RunSpec,
    environments: Mapping[str, TurnEnvironment],
    sample: Sample,
) -> list[list[Turn]]:
    """The turns of each rollout, in the lease's order of groups and seeds. Raises NothingSampled, and what `sample` raises."""
    desk, alone = Desk(sample), asyncio.Lock()
    bounds = bounds_of(spec)
    played = await desk.serving(
        asyncio.gather(
            *(
                _turns(
                    group,
                    environments.get(group.problem.environment),
                    partial(EpisodeRecorder, seed, bounds[group.problem.environment], desk.ask),
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
    """Of one rollout; its seeds make a second time like the first."""
    recorder, problem = begin(), group.problem
    if environment is None:  # of one turn
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
