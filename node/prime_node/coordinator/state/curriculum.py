"""Which problems are worth asking: difficulty pools, and groups that teach nothing. The state's part of it, pure.

    easy, hard   problems whose last group's mean reward was at or beyond a threshold; they are not drawn any more
    normal       all others
    filtered     accepted groups whose rollouts all failed or all succeeded, thrown away before a batch takes them (online
                 difficulty filtering): their slots are leased again, with other problems

A problem is known by its example, a digest of environment and prompt: a question that a generator or a data set repeats is one.
A slot draws its problem when it is leased while nobody holds it. The draw is in the lease's event, so lease, check and batch
agree on it for ever. curation.py decides; here its decisions are carried out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from operator import attrgetter

EXAMPLES_MAX = 100_000
"""Examples whose last result is remembered; beyond it the one that was looked at longest ago is forgotten."""


_PLACE = attrgetter("environment", "pool")


class Pool(StrEnum):
    """Where a problem is."""

    EASY = "easy"
    """Solved: it has nothing to teach."""
    NORMAL = "normal"
    """Drawn like any other."""
    HARD = "hard"
    """Never solved: it has nothing to teach yet."""


@dataclass(frozen=True, slots=True)
class Rating:
    """What an accepted group said about its problem."""

    slot: int
    example: str
    """Digest of environment and prompt."""
    environment: str
    index: int
    """One of the environment's indices that give this problem."""
    reward_mean: float
    pool: Pool
    """Where it belongs from now on."""
    filtered: Pool | None = None
    """The group is thrown away, as too easy or too hard."""


@dataclass(slots=True)
class Example:
    """What is known of a problem."""

    environment: str
    index: int
    reward_mean: float
    """Of its last group."""
    pool: Pool
    step: int
    """Of its last group."""


@dataclass(slots=True)
class Curriculum:
    """Empty where the curriculum is switched off."""

    examples: dict[str, Example] = field(default_factory=dict)
    """By digest, the one longest not looked at first."""
    draws: dict[int, int] = field(default_factory=dict)
    """Slots of the window whose problem is not the first draw."""
    redraw: set[int] = field(default_factory=set)
    """Slots whose group was thrown away: they draw on when they are leased again."""
    filtered: dict[int, int] = field(default_factory=dict)
    """Step of the window -> groups thrown away."""
    counts: dict[str, int] = field(default_factory=dict)
    """Since the run began: `evicted_examples/ENVIRONMENT/easy`, `filtered_rollouts/ENVIRONMENT/hard`, and the like."""

    def is_pooled(self, example: str) -> bool:
        known = self.examples.get(example)
        return known is not None and known.pool is not Pool.NORMAL

    def drawn(self, slots: Iterable[int], draws: Iterable[int]) -> None:
        """Slots that are leased have these problems."""
        for slot, draw in zip(slots, draws, strict=True):
            if draw != self.draws.get(slot, 0):  # else somebody works on it already
                self.draws[slot] = draw
                self.redraw.discard(slot)

    def rate(self, rating: Rating, *, step: int, num_rollouts: int) -> None:
        """Of `num_rollouts`. The caller throws a filtered group away."""
        known = self.examples.pop(rating.example, None)
        before = Pool.NORMAL if known is None else known.pool
        self.examples[rating.example] = Example(rating.environment, rating.index, rating.reward_mean, rating.pool, step)
        if rating.pool is not before and rating.pool is not Pool.NORMAL:
            self._count(f"evicted_examples/{rating.environment}/{rating.pool}", 1)
        if rating.filtered is not None:
            self.redraw.add(rating.slot)
            self.filtered[step] = self.filtered.get(step, 0) + 1
            self._count(f"filtered_rollouts/{rating.environment}/{rating.filtered}", num_rollouts)
        while len(self.examples) > EXAMPLES_MAX:
            del self.examples[next(iter(self.examples))]

    def lift(self, examples: Iterable[str]) -> None:
        """Back to `normal`."""
        for example in examples:
            self.examples[example].pool = Pool.NORMAL

    def forget_before(self, first_step: int, *, groups_per_step: int) -> None:
        """Slots of earlier steps are trained and durable."""
        first = first_step * groups_per_step
        for slot in [slot for slot in self.draws if slot < first]:
            del self.draws[slot]
        self.redraw = {slot for slot in self.redraw if slot >= first}
        for step in [step for step in self.filtered if step < first_step]:
            del self.filtered[step]

    def shares(self) -> dict[str, float]:
        """`pool/ENVIRONMENT/easy` and the like: shares of the examples that are known."""
        counts = Counter(map(_PLACE, self.examples.values()))
        environments = dict.fromkeys(environment for environment, _ in counts)
        totals = {name: sum(counts[name, pool] for pool in Pool) for name in environments}
        return {f"pool/{name}/{pool}": counts[name, pool] / totals[name] for name in environments for pool in Pool}

    def _count(self, name: str, amount: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount
