"""Generating for a lease whose environments answer.

Who waits for whom: every rollout of the lease is an episode of its own; those that ask at the same time are asked together
(envs/episodes.py). An environment is not ours: whatever it raises ends its episode, and what was sampled before counts, for a
validator's may well raise the same there; where it goes on instead, the bundle is refused as incomplete, which is no strike.
Where its process ends, nothing counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from prime_node.envs.episodes import Desk, Recorder, bounds_of
from prime_node.ports.engine import GenerateRequest
from prime_node.ports.environment import Ask, EnvironmentGone, TurnEnvironment
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
    """The turns of each rollout, in the lease's order of groups and seeds. Raises NothingSampled and EnvironmentGone, and what
    `sample` raises."""
    desk = Desk(sample)
    bounds = bounds_of(spec)
    recorders: list[Recorder] = []
    episodes: list[Awaitable[float]] = []
    for group in lease.groups:
        for seed in group.seeds:
            recorder = Recorder(seed, bounds[group.problem.environment], desk.ask)
            recorders.append(recorder)
            episodes.append(_episode(group, environments.get(group.problem.environment), recorder))
    await desk.serving(asyncio.gather(*episodes))
    if not all(recorder.turns for recorder in recorders):
        raise NothingSampled
    return [recorder.turns for recorder in recorders]


async def _episode(group: GroupAssignment, environment: TurnEnvironment | None, ask: Ask) -> float:
    if environment is None:  # of one turn
        await ask(group.prompt_token_ids)
        return 0.0
    try:
        return await environment.play(group.problem.index, group.prompt_token_ids, ask)
    except EnvironmentGone:
        raise
    except Exception:
        problem = group.problem
        log.warning("environment %s, problem %d: an episode failed", problem.environment, problem.index, exc_info=True)
        return 0.0
