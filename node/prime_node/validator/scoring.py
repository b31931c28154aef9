"""Rewards, computed from the tokens alone; what an environment cannot score is said, and is nobody's reward."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prime_node.ports.environment import Environment, Tokenizer
from prime_protocol.assignment import Lease
from prime_protocol.rollout import FinishReason, Rollouts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scored:
    """The rewards of a bundle, in its order."""

    rewards: tuple[float, ...]
    """0 where there is none."""
    unscored: tuple[int, ...]
    """Indices of completions that the environment failed on."""
    fault: str
    """The last failure, for the operator."""


def score_rollouts(
    lease: Lease, rollouts: Rollouts, environments: Mapping[str, Environment], tokenizer: Tokenizer
) -> Scored:
    problems = [group.problem for group in lease.groups for _ in group.seeds]
    rewards, unscored, fault = [], [], ""
    for index, (problem, completion) in enumerate(zip(problems, rollouts.completions(), strict=True)):
        text = tokenizer.decode(list(completion.token_ids))
        finished = completion.finish is FinishReason.STOP
        try:
            rewards.append(environments[problem.environment].score(problem.index, text, finished=finished))
        except Exception as error:  # an environment's code is not ours: whatever it raises, the validator goes on
            log.warning("environment %s, problem %d: scoring failed", problem.environment, problem.index, exc_info=True)
            fault = f"environment {problem.environment} cannot score problem {problem.index}: {type(error).__name__}"
            rewards.append(0.0)
            unscored.append(index)
    return Scored(tuple(rewards), tuple(unscored), fault)


def enough_scored(lease: Lease, unscored: Sequence[int], *, group_rollouts_min: int | None) -> bool:
    """Whether so many completions of each group have a reward."""
    missing, first = set(unscored), 0
    for group in lease.groups:
        size = len(group.seeds)
        num_scored = size - len(missing & set(range(first, first + size)))
        if num_scored < min(size, group_rollouts_min or size):
            return False
        first += size
    return True
