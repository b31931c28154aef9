"""Rewards that the trainer itself finds for a batch, kept for the steps that it computes again after a kill.

Further rewards of completions, for an advantage that compares several, are graded again by the trainer's environments, in the
feed's thread, ahead of the step. Rollouts of several turns are played again with their recorded answers, as validators do.

Greedy completions and grades may be others the second time: an engine on another machine, a judge, a grader that failed. With
them the policy would be another one than the published one. So the values of the first time are durable before a step uses
them, and a step that is computed again uses them. A file that is not as it was written is not used, and its values are found
again.

    rewards/00000012-1-greedy-0.json     step 12, batch 1 of the step, greedy completions of its first mini-batch
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prime_node.envs.episodes import Bounds, bounds_of, replayed
from prime_node.files import disk_fault, disk_faults, write_durably
from prime_node.inside import place
from prime_node.ports.environment import (
    Ask,
    Environment,
    PartedEnvironment,
    PartedTurnEnvironment,
    Tokenizer,
    graded_together,
)
from prime_node.ports.train_samples import Group, TrainingMode
from prime_node.trainer.recipe import Recipe
from prime_node.training_data.feed import StepBatch
from prime_protocol.digest import digest_of
from prime_protocol.rollout import FinishReason
from prime_protocol.run_spec import RunSpec
from prime_protocol.turns import Turn

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RewardsKey:
    """What some rewards are of. Example: RewardsKey(12, 1, digest, "greedy-0", (96, 97))."""

    step: int
    part: int
    batch: str
    """Digest of the signed batch."""
    what: str
    slots: tuple[int, ...]
    """Slots of the groups, in the order of their rewards."""

    @property
    def file_name(self) -> str:
        """Return the name of their file."""
        return f"{self.step:08d}-{self.part}-{self.what}.json"


class KeptRewards:
    """Files in a folder. Several threads may use it, for different keys."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob("*.partial"):
            unfinished.unlink()
        self._folder = folder

    def read(self, key: RewardsKey) -> Any:
        """Return rewards as they were kept; None if there are none of these groups. Raises LocalError."""
        path = place(self._folder, key.file_name)
        try:
            digest, _, data = path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise disk_fault(error) from None
        if digest_of(data) != digest.decode("ascii", "replace"):
            log.warning("%s is damaged: its rewards are found again", path)
            return None
        found = json.loads(data)
        return found["rewards"] if (found["batch"], found["slots"]) == (key.batch, [*key.slots]) else None

    def keep(self, key: RewardsKey, rewards: Any) -> None:
        """Keep rewards durably, as JSON has them. Raises LocalError: a step whose rewards are lost might not be repeatable."""
        document = {"batch": key.batch, "slots": key.slots, "rewards": rewards}
        data = json.dumps(document, allow_nan=False).encode()
        path = place(self._folder, key.file_name)
        with disk_faults(path):
            write_durably(path, digest_of(data).encode() + b"\n" + data)

    def forget(self, durable_step: int) -> None:
        """Delete the rewards of the steps before `durable_step`. Idempotent."""
        for path in self._folder.glob("*.json"):
            if int(path.name.partition("-")[0]) < durable_step:
                path.unlink(missing_ok=True)


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
