"""Further rewards of a batch's completions, for an advantage that compares several: graded again by the trainer's environments.

Synchronous: it runs in the feed's thread, ahead of the step. Rollouts of several turns are played again with their recorded
answers, as validators do.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from prime_node.envs.episodes import Bounds, bounds_of, replayed
from prime_node.ports.environment import (
    Ask,
    Environment,
    PartedEnvironment,
    PartedTurnEnvironment,
    Tokenizer,
    graded_together,
)
from prime_node.ports.train_samples import Group, TrainingMode
from prime_node.trainer.kept_rewards import KeptRewards, RewardsKey
from prime_node.trainer.recipe import Recipe
from prime_node.training_data.feed import StepBatch
from prime_protocol.rollout import FinishReason
from prime_protocol.run_spec import RunSpec
from prime_protocol.turns import Turn

log = logging.getLogger(__name__)

Parts = tuple[Mapping[str, float], ...]


class FurtherRewards:
    """Grader of the further rewards of a run's completions."""

    def __init__(
        self, environments: Mapping[str, Environment], tokenizer: Tokenizer, spec: RunSpec, kept: KeptRewards | None
    ) -> None:
        self._environments = environments
        self._tokenizer = tokenizer
        self._bounds = bounds_of(spec)
        self._deterministic = {one.name for one in spec.environments if one.is_deterministic}
        self._kept = kept

    def graded(self, batch: StepBatch, recipe: Recipe) -> StepBatch:
        """Return a batch; its groups of mode rl with the rewards that the advantage compares, as they were the first time."""
        if not (names := recipe.advantage.reward_parts):
            return batch
        slots = tuple(group.slot for group in batch.groups)
        key = RewardsKey(batch.step, batch.part, batch.digest, "further", slots)
        found: Sequence[Sequence[Mapping[str, float]]] | None = None if self._kept is None else self._kept.read(key)
        if found is None:
            is_rl = [recipe.mode_of(group.environment) is TrainingMode.RL for group in batch.groups]
            found = [self.of(group) if its else () for group, its in zip(batch.groups, is_rl, strict=True)]
            if self._kept is not None:
                self._kept.keep(key, [[dict(parts) for parts in group] for group in found])
        if missing := sorted(names - {name for group in found for parts in group for name in parts}):
            log.warning("step %d: no answer has the rewards %s: they count as 0", batch.step, ", ".join(missing))
        groups = [replace(group, reward_parts=tuple(parts)) for group, parts in zip(batch.groups, found, strict=True)]
        return replace(batch, groups=tuple(groups))

    def of(self, group: Group) -> Parts:
        """Return the further rewards of each completion of a group by name; none where they cannot be had, with a warning."""
        environment, index = self._environments.get(group.environment), group.problem_index
        found: list[Mapping[str, float]] = [{} for _ in group.completions]
        if environment is None or index is None:
            return tuple(found)
        with graded_together():
            for number in range(len(found)):
                try:
                    found[number] = self._of_rollout(group, number, environment, index)
                except Exception:  # third-party code
                    log.warning("environment %s: no further rewards of an answer", group.environment, exc_info=True)
        return tuple(found)

    def _of_rollout(self, group: Group, number: int, environment: Environment, index: int) -> Mapping[str, float]:
        if group.turns:
            if not isinstance(environment, PartedTurnEnvironment):
                return {}
            bounds, exact = self._bounds[group.environment], group.environment in self._deterministic
            return asyncio.run(
                _replayed_parts(environment, index, group.prompt_token_ids, group.turns[number], bounds, exact=exact)
            )
        if not isinstance(environment, PartedEnvironment):
            return {}
        completion = group.completions[number]
        text, finished = self._tokenizer.decode(list(completion.token_ids)), completion.finish is FinishReason.STOP
        return environment.parts(index, text, finished=finished)


async def _replayed_parts(
    environment: PartedTurnEnvironment,
    index: int,
    prompt_token_ids: tuple[int, ...],
    turns: Sequence[Turn],
    bounds: Bounds,
    *,
    exact: bool,
) -> Mapping[str, float]:
    found: dict[str, float] = {}

    async def play(ask: Ask) -> float:
        found.update(await environment.play_parts(index, prompt_token_ids, ask))
        return 0.0

    await replayed(play, turns, bounds, exact=exact)
    return found
