"""prime-rl's sampler of problems by difficulty pools.

PrimeIntellect-ai/prime-rl, src/prime_rl/orchestrator/curriculum/samplers/pool.py (`DifficultyPoolSampler`) at
114f3ca4581860d6f12cb403b083d22a7a151adb, and `sample` of its earlier form, curriculum/difficulty_pools.py at
235e935078f4c65a55dfb0c69986313aa7516f01, which draws one problem after another. Both give a problem the same chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PoolSampler:
    """Weights of problems by the mean reward of their last groups."""

    pools: Mapping[str, tuple[float, float]]
    """Name -> the largest mean reward of the pool, and the weight of its problems."""
    results: dict[str, float] = field(default_factory=dict)
    """Problem -> mean reward of its last group."""

    def observe(self, problem: str, rewards: Sequence[float]) -> None:
        """A group is finished. One without a scored rollout changes nothing."""
        if rewards:
            self.results[problem] = math.fsum(rewards) / len(rewards)

    def pool(self, problem: str) -> str | None:
        """The pool with the smallest bound that the result does not exceed, else the last; None before the first result."""
        if problem not in self.results:
            return None
        upwards = sorted(self.pools, key=lambda name: self.pools[name][0])
        fitting = [name for name in upwards if self.results[problem] <= self.pools[name][0]]
        return (fitting or upwards[-1:])[0]

    def weight(self, problem: str) -> float:
        """The pool's weight; 1 for a problem without a result."""
        pool = self.pool(problem)
        return 1.0 if pool is None else self.pools[pool][1]

    def chances(self, problems: Sequence[str]) -> list[float]:
        """The chance of each problem to be the next."""
        weights = [self.weight(problem) for problem in problems]
        return [weight / sum(weights) for weight in weights]

    def sample(self, draws: Iterable[str], uniform: Callable[[], float]) -> int | None:
        """The place of the first draw that its weight admits; None if none is. Problems without a result may remain."""
        ceiling = max(1.0, *(weight for _, weight in self.pools.values()))
        for place, problem in enumerate(draws):
            if uniform() * ceiling < self.weight(problem):
                return place
        return None
