"""Selection of problems: difficulty pools and online difficulty filtering. The state's part of the curriculum, pure.

    easy, hard   problems whose last group's mean reward was at or beyond a threshold; they are not drawn any more
    normal       all others
    filtered     accepted groups whose rollouts all failed or all succeeded, dropped before a batch takes them (online
                 difficulty filtering): their slots are leased again, with other problems

A problem is identified by its example, a digest of environment and prompt. A question that a generator or a data set repeats is
one problem. A slot draws its problem when it is leased while no worker holds it. The lease's event contains the draw, so lease,
check and batch always agree on it. curation.py decides; this file applies its decisions.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate

EXAMPLES_MAX = 100_000
"""Examples whose last result is kept; beyond it the example that was rated longest ago is evicted."""


class Pool(StrEnum):
    """The difficulty pool of a problem."""

    EASY = "easy"
    """Solved: no learning signal."""
    NORMAL = "normal"
    """Drawn as usual."""
    HARD = "hard"
    """Never solved: no learning signal yet."""


@dataclass(frozen=True, slots=True)
class Rating:
    """The result of an accepted group for its problem."""

    slot: int
    example: str
    """Digest of environment and prompt."""
    environment: str
    index: int
    """One of the environment's indices that give this problem."""
    reward_mean: float
    pool: Pool
    """The problem's pool from now on."""
    filtered: Pool | None = None
    """The pool for which the group is dropped, too easy or too hard; None: the group is kept."""


@dataclass(slots=True)
class Example:
    """The last result of a problem."""

    environment: str
    index: int
    reward_mean: float
    """Mean reward of its last group."""
    pool: Pool
    step: int
    """Step of its last group."""


@dataclass(slots=True)
class Curriculum:
    """The state of the curriculum. Empty if the run has none."""

    examples: dict[str, Example] = field(default_factory=dict)
    """Examples by digest, the least recently rated first."""
    draws: dict[int, int] = field(default_factory=dict)
    """Slots of the window whose problem is not the first draw."""
    redraw: set[int] = field(default_factory=set)
    """Slots whose group was dropped: they draw the next problem when they are leased again."""
    filtered: dict[int, int] = field(default_factory=dict)
    """Step of the window -> dropped groups."""
    counts: dict[str, int] = field(default_factory=dict)
    """Totals since the run began: `evicted_examples/ENVIRONMENT/easy`, `filtered_rollouts/ENVIRONMENT/hard`, and so on."""

    def drawn(self, slots: Iterable[int], draws: Iterable[int]) -> None:
        """Record the draws of leased slots."""
        for slot, draw in zip(slots, draws, strict=True):
            if draw != self.draws.get(slot, 0):  # else another worker holds it already
                self.draws[slot] = draw
                self.redraw.discard(slot)

    def rate(self, rating: Rating, *, step: int, num_rollouts: int) -> None:
        """Apply the rating of a group of `num_rollouts` rollouts. The caller drops a filtered group."""
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
        """Move examples back to the normal pool."""
        for example in examples:
            self.examples[example].pool = Pool.NORMAL

    def forget_before(self, first_step: int, *, groups_per_step: int) -> None:
        """Forget the slots of steps before `first_step`: they are trained and durable."""
        first = first_step * groups_per_step
        for slot in [slot for slot in self.draws if slot < first]:
            del self.draws[slot]
        self.redraw = {slot for slot in self.redraw if slot >= first}
        for step in [step for step in self.filtered if step < first_step]:
            del self.filtered[step]

    def shares(self, pools: Sequence[str], place_of: Callable[[Example], str]) -> dict[str, float]:
        """Return the share of known examples in each pool, as `pool/ENVIRONMENT/POOL`. `place_of` names an example's pool."""
        counts = Counter((known.environment, place_of(known)) for known in self.examples.values())
        environments = dict.fromkeys(environment for environment, _ in counts)
        totals = {name: sum(counts[name, pool] for pool in pools) for name in environments}
        return {f"pool/{name}/{pool}": counts[name, pool] / totals[name] for name in environments for pool in pools}

    def _count(self, name: str, amount: int) -> None:
        self.counts[name] = self.counts.get(name, 0) + amount


def chosen_place(weights: Iterable[float], chances: Iterator[float], *, weight_max: float) -> int:
    """Return the place of the candidate that is taken, by weight: candidates are independent draws from all problems.

    Each is taken with the chance weight / `weight_max`, so problems are taken in proportion to their weights. If none is, one of
    these candidates is chosen by weight, the first one if all weights are 0. `chances` are uniform numbers in [0, 1).
    """
    seen: list[float] = []
    for weight in weights:
        if next(chances) * weight_max < weight:
            return len(seen)
        seen.append(weight)
    sums = list(accumulate(seen))
    return min(bisect_right(sums, next(chances) * sums[-1]), len(seen) - 1) if sums[-1] > 0.0 else 0
