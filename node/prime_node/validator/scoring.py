"""Rewards, computed from the tokens alone. Completions that an environment cannot score are listed, without a reward."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from prime_node.envs.episodes import CutShort, WrongContext, bounds_of, scored
from prime_node.ports.environment import (
    Environment,
    EnvironmentGone,
    EnvironmentSilent,
    Tokenizer,
    TurnEnvironment,
)
from prime_node.validator.references import References
from prime_protocol.assignment import Lease, Problem
from prime_protocol.limits import REWARD_MAX
from prime_protocol.rollout import Completion, FinishReason, Rollouts
from prime_protocol.run_spec import RunSpec
from prime_protocol.turns import episodes_of

log = logging.getLogger(__name__)

HANGS_MAX = 3
"""Completions of a bundle on which an environment may hang before scoring stops: each takes minutes."""


class NotWanted(Exception):
    """The bundle is no longer this validator's to judge."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The rewards of a bundle, in its order."""

    rewards: tuple[float, ...]
    """Rewards; 0 for an unscored completion."""
    unscored: tuple[int, ...]
    """Indices of completions on which the environment failed."""
    fault: str
    """Last failure, for the operator."""
    enough: bool
    """Whether enough completions of each group have a reward. If not, scoring may have stopped early."""
    spread_mean: float | None
    """Mean over completions of the largest difference between scorings of one completion; None if each is scored once."""


async def score_rollouts(
    lease: Lease,
    rollouts: Rollouts,
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    *,
    spec: RunSpec,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Scored:
    """Score the rollouts of a bundle.

    Blocking environments run in a thread. Raises WrongContext if a rollout's turns are not what its environment asks
    for; CutShort only if there is no other fault. Raises NotWanted as soon as `is_wanted`, called before each rollout, says no.
    """
    problems = [group.problem for group in lease.groups for _ in group.seeds]
    specs, bounds = {one.name: one for one in spec.environments}, bounds_of(spec)
    rewards, unscored, fault, enough = [], [], "", True
    spreads = []
    cut_short: CutShort | None = None
    hangs = 0
    for index, (problem, turns) in enumerate(zip(problems, episodes_of(rollouts, lease), strict=True)):
        if not is_wanted():
            raise NotWanted
        environment, its = environments[problem.environment], specs[problem.environment]
        try:
            if its.turns_max > 1 and isinstance(environment, TurnEnvironment):
                play = partial(environment.play, problem.index, _prompt_of(lease, index))
                scores = await scored(play, turns, bounds[its.name], exact=its.is_deterministic, scorings=its.scorings)
            else:
                scores = await _scores(turns[0].completion, problem, environment, tokenizer, its.scorings)
            reward = statistics.median(scores)
            if not abs(reward) <= REWARD_MAX:  # also NaN
                raise ValueError(f"its reward is {reward}, and {REWARD_MAX:g} is the largest magnitude")
            rewards.append(reward)
            if its.scorings > 1:
                spreads.append(max(scores) - min(scores))
        except WrongContext as error:
            named = type(error)(f"rollout {index}, environment {problem.environment}: {error}")
            if not isinstance(named, CutShort):
                raise named from None
            cut_short = named
        except Exception as error:  # third-party code: whatever it raises, the validator continues
            log.warning("environment %s, problem %d: scoring failed", problem.environment, problem.index, exc_info=True)
            fault = f"environment {problem.environment} cannot score problem {problem.index}: {type(error).__name__}"
            rewards.append(0.0)
            unscored.append(index)
            enough = _enough_scored(lease, unscored, group_rollouts_min=spec.schedule.group_rollouts_min)
            if isinstance(error, EnvironmentGone | EnvironmentSilent):
                hangs += 1
                enough = enough and hangs < HANGS_MAX
                if not enough:
                    break  # answers that hang a grader cost a few timeouts, not one each
    if cut_short is not None:
        raise cut_short
    return Scored(
        tuple(rewards), tuple(unscored), fault, enough, spread_mean=statistics.fmean(spreads) if spreads else None
    )


async def score_references(
    lease: Lease,
    references: References,
    environments: Mapping[str, Environment],
    tokenizer: Tokenizer,
    *,
    spec: RunSpec,
) -> dict[int, list[float]]:
    """Return the rewards of each group's references.

    References on which the environment fails are left out, as for the worker's.
    """
    scorings = {one.name: one.scorings for one in spec.environments}
    rewards: dict[int, list[float]] = {}
    for index, completions in references.items():
        problem = lease.groups[index].problem
        found = rewards.setdefault(index, [])
        for completion in completions:
            environment = environments[problem.environment]
            try:
                scores = await _scores(completion, problem, environment, tokenizer, scorings[problem.environment])
            except Exception as error:  # third-party code, as above
                log.warning("environment %s: a reference has no reward", problem.environment, exc_info=True)
                if isinstance(error, EnvironmentGone | EnvironmentSilent):
                    break
                continue
            if abs(reward := statistics.median(scores)) <= REWARD_MAX:  # false for NaN
                found.append(reward)
    return rewards


async def _scores(
    answer: Completion, problem: Problem, environment: Environment, tokenizer: Tokenizer, scorings: int
) -> list[float]:
    text, finished = tokenizer.decode(list(answer.token_ids)), answer.finish is FinishReason.STOP
    return await asyncio.to_thread(
        lambda: [environment.score(problem.index, text, finished=finished) for _ in range(scorings)]
    )


def _prompt_of(lease: Lease, rollout: int) -> tuple[int, ...]:
    return [group.prompt_token_ids for group in lease.groups for _ in group.seeds][rollout]


def _enough_scored(lease: Lease, unscored: Sequence[int], *, group_rollouts_min: int | None) -> bool:
    """Return whether enough completions of each group have a reward."""
    missing, first = set(unscored), 0
    for group in lease.groups:
        size = len(group.seeds)
        num_scored = size - len(missing & set(range(first, first + size)))
        if num_scored < min(size, group_rollouts_min or size):
            return False
        first += size
    return True
