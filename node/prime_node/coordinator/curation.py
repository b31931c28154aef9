"""Curriculum decisions: the problem that a slot draws, the pool of a problem, and the groups that are filtered.

The pools belong to the coordinator, because it chooses problems and gets the validators' rewards first. They are part of its
state, so a restart keeps them. They are also written to easy_examples.jsonl and hard_examples.jsonl whenever the trainer's
checkpoint advances. A new run whose folder contains such files starts with them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from prime_node.coordinator.assignments import DRAWS_MAX, Assigner
from prime_node.coordinator.curriculum_config import CurriculumConfig
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.curriculum import Example, Pool, Rating, chosen_place
from prime_node.coordinator.state.records import LeaseRecord
from prime_node.ports.documents import Documents
from prime_node.ports.metrics import Metrics
from prime_protocol import limits
from prime_protocol.errors import LocalError

log = logging.getLogger(__name__)

TRIES_MAX = 64
"""Problems in a row that a slot draws and does not take. Then it takes one of them by their weights, the first if all are 0."""
DRAW_MAX = limits.LEASE_DRAWS_MAX - DRAWS_MAX
"""Last draw of a slot. A verifier of its seeds tries no draw beyond the protocol's limit, and too long prompts use some."""
_FILES = {Pool.EASY: "easy_examples.jsonl", Pool.HARD: "hard_examples.jsonl"}


@dataclass(slots=True)
class Curation:
    """The curriculum of a run: draws, ratings and the pools on disk."""

    config: CurriculumConfig
    decisions: Decisions
    assigner: Assigner
    private: Documents
    metrics: Metrics

    def draws_of(self, slots: tuple[int, ...]) -> tuple[int, ...]:
        """Return the draw of each slot that is about to be leased; empty if all take their first.

        A problem that always fails is exchanged even without a curriculum (state/failing.py).
        """
        curriculum = self.decisions.state.curriculum
        if self.decisions.state.is_evaluation(slots) or (
            not self.config.is_on and not curriculum.draws and not curriculum.redraw
        ):
            return ()
        draws = tuple(self._draw(slot) for slot in slots)
        return draws if any(draws) else ()

    def _draw(self, slot: int) -> int:
        state = self.decisions.state
        draw = state.curriculum.draws.get(slot, 0)
        if slot in state.steps[slot // state.rules.groups_per_step].held:
            return draw  # another worker holds it already
        if slot in state.curriculum.redraw:
            draw = self.assigner.asked_draw(slot, draw) + 1
        if state.curriculum.examples:
            tries, examples = range(draw, draw + TRIES_MAX), state.curriculum.examples
            weights = (self.config.weight_of(examples.get(self.assigner.example(slot, tried))) for tried in tries)
            chances = (self.assigner.draw_chance(slot, tried) for tried in count(draw))
            draw = tries[chosen_place(weights, chances, weight_max=self.config.sampler.weight_max)]
        return min(draw, DRAW_MAX)

    def rate(self, lease: LeaseRecord, bundle: str) -> None:
        """Rate the groups of an accepted bundle that fill their slots."""
        config, state = self.config, self.decisions.state
        step = state.steps.get(lease.step)
        if not config.is_on or step is None:
            return
        ratings: list[Rating] = []
        for slot in lease.slots:
            group = step.accepted.get(slot)
            if group is None or group.bundle != bundle:
                continue  # another one was faster
            unscored = set(group.unscored)
            rewards = [reward for place, reward in enumerate(group.rewards) if place not in unscored]
            if not rewards:
                continue
            mean = statistics.fmean(rewards)
            filtered = config.filtered_as(rewards)
            thrown_away = state.curriculum.filtered.get(lease.step, 0) + sum(
                each.filtered is not None for each in ratings
            )
            if thrown_away >= (config.oversampling_factor - 1.0) * state.rules.groups_per_step:
                filtered = None
            problem, _ = self.assigner.problem(slot)
            example = self.assigner.example(slot, state.curriculum.draws.get(slot, 0))
            ratings.append(
                Rating(slot, example, problem.environment, problem.index, mean, config.pool_of(mean), filtered)
            )
        if ratings:
            self.decisions.decide(ev.GroupsRated(lease.step, tuple(ratings)))

    def report(self) -> None:
        """Set the gauges, under the names of prime-rl. It visits all examples, so call it for readers, not for each bundle."""
        for name, value in {
            **self.config.shares(self.decisions.state.curriculum),
            **self.decisions.state.curriculum.counts,
        }.items():
            self.metrics.set("prime_curriculum", value, name=name)

    async def restore_pools(self, rng: random.Random) -> None:
        """Read the pools that an earlier run left, and lift shares of them back into `normal`, at the start of the coordinator.

        Raise LocalError if a file cannot be read.
        """
        config, curriculum = self.config, self.decisions.state.curriculum
        if not config.is_on:
            return
        if not curriculum.examples and self.decisions.number == 0:
            found = [rating for pool in _FILES for rating in await self._read(pool)]
            if found:
                self.decisions.decide(ev.GroupsRated(0, tuple(found)))
                log.info("curriculum: restored %d pooled examples of an earlier run", len(found))
        lifted: list[str] = []
        for pool, share in ((Pool.EASY, config.easy_fraction), (Pool.HARD, config.hard_fraction)):
            pooled = [example for example, known in curriculum.examples.items() if known.pool is pool]
            lifted += rng.sample(pooled, round(share * len(pooled)))
        if lifted:
            self.decisions.decide(ev.ExamplesLifted(tuple(lifted)))
            log.info("curriculum: %d pooled examples return to the draw", len(lifted))

    async def save(self) -> None:
        """Write the pools, one example per line. In a thread: 100,000 examples take a second."""
        known = list(self.decisions.state.curriculum.examples.items())
        for pool, name in _FILES.items():
            await self.private.write(name, await asyncio.to_thread(_lines, pool, known))

    async def _read(self, pool: Pool) -> list[Rating]:
        try:
            data = await self.private.read(_FILES[pool])
        except KeyError:
            return []
        try:
            rows = [json.loads(line) for line in data.decode().splitlines() if line.strip()]
            return [
                Rating(
                    -1, str(row["example"]), str(row["environment"]), int(row["index"]), float(row["reward_mean"]), pool
                )
                for row in rows
            ]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise LocalError(f"{_FILES[pool]}: {error!r}; repair or delete this file") from None


def _lines(pool: Pool, known: Iterable[tuple[str, Example]]) -> bytes:
    lines = (json.dumps(_line(name, example), sort_keys=True) for name, example in known if example.pool is pool)
    return "".join(f"{line}\n" for line in lines).encode()


def _line(example: str, known: Example) -> dict[str, object]:
    return {
        "example": example,
        "environment": known.environment,
        "index": known.index,
        "reward_mean": known.reward_mean,
        "step": known.step,
    }
