"""Problems are drawn as prime-rl's sampler of difficulty pools draws them: 100,000 decisions, and none differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from tests.oracles.prime_rl_pools import PoolSampler

from prime_node.coordinator.curation import TRIES_MAX
from prime_node.coordinator.curriculum_config import CurriculumConfig
from prime_node.coordinator.state.curriculum import Curriculum, Rating, chosen_place

DECISIONS, OF_ONE_RUN = 100_000, 500
PROBLEMS = [str(number) for number in range(12)]


class Both:
    """Our curriculum and prime-rl's, with the same pools and results."""

    def __init__(self, random: Random, *, is_default: bool = False) -> None:
        thresholds = random.sample(range(5), random.randint(1, 4))
        weights = [random.choice((0.0, 0.05, 0.2, 1.0, 3.0)) for _ in thresholds[1:]]
        made = {f"pool {n}": (n / 4, weight) for n, weight in zip(thresholds, [*weights, 0.5], strict=True)}
        pools = {"hard": (0.25, 0.2), "normal": (0.75, 1.0), "easy": (1.0, 0.2)} if is_default else made
        given = {name: {"threshold": threshold, "weight": weight} for name, (threshold, weight) in pools.items()}
        sampler = {"type": "difficulty_pool"} if is_default else {"type": "difficulty_pool", "pools": given}
        self.config = CurriculumConfig.model_validate({"sampler": sampler})
        self.ours, self.theirs = Curriculum(), PoolSampler(pools)

    def finish(self, problem: str, rewards: list[float]) -> None:
        """A group is accepted: curation.py rates the scored rollouts."""
        if rewards:
            mean = sum(rewards) / len(rewards)
            rating = Rating(0, problem, "letters", int(problem), mean, self.config.pool_of(mean))
            self.ours.rate(rating, step=0, num_rollouts=len(rewards))
        self.theirs.observe(problem, rewards)

    def weight(self, problem: str) -> float:
        return self.config.weight_of(self.ours.examples.get(problem))

    def draw(self, draws: list[str], uniform: Callable[[], float]) -> int:
        chances = iter(uniform, None)
        return chosen_place(map(self.weight, draws), chances, weight_max=self.config.sampler.weight_max)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_draw_of_a_problem_differs() -> None:
    random, decided, kinds = Random(7), 0, Counter[str]()
    while decided < DECISIONS:
        both = Both(random, is_default=random.random() < 0.2)
        for _ in range(OF_ONE_RUN):
            rewards = [random.randint(0, 4) / 4 for _ in range(random.randint(0, 4))]
            both.finish(random.choice(PROBLEMS), rewards)
            draws, seed = random.choices(PROBLEMS, k=TRIES_MAX), random.random()
            expected = both.theirs.sample(draws, Random(seed).random)
            place = both.draw(draws, Random(seed).random)
            kinds["capped" if expected is None else "drawn"] += 1
            if expected is None:
                weights = [both.theirs.weight(problem) for problem in draws]
                assert weights[place] > 0.0 or not any(weights), "the choice among capped draws is by weight"
            else:
                assert place == expected
            decided += 1
    assert kinds["drawn"] > 50 * kinds["capped"] > 0


def test_pools_and_weights_are_those_of_prime_rl() -> None:
    random = Random(1)
    for _ in range(200):
        both = Both(random, is_default=random.random() < 0.5)
        for problem in PROBLEMS:
            both.finish(problem, [random.randint(0, 4) / 4 for _ in range(random.randint(0, 4))])
        for problem in PROBLEMS:
            assert both.weight(problem) == both.theirs.weight(problem)
            known, pool = both.ours.examples.get(problem), both.theirs.pool(problem)
            assert (None if known is None else both.config.sampler.name_of(known.reward_mean)) == pool


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_problems_are_drawn_in_proportion_to_their_weights(scale: float) -> None:
    """Also if weights are so small that most draws are capped, when it is so within a part in TRIES_MAX."""
    random = Random(3)
    theirs = PoolSampler({"low": (0.5, 0.2 * scale), "high": (1.0, scale)})
    for number, problem in enumerate(PROBLEMS):
        theirs.observe(problem, [number / 12])
    num, found = 4_000, Counter[str]()
    for _ in range(num):
        draws = random.choices(PROBLEMS, k=TRIES_MAX)
        chances = iter(random.random, None)
        found[draws[chosen_place(map(theirs.weight, draws), chances, weight_max=1.0)]] += 1
    chi2 = sum(
        (found[problem] - num * chance) ** 2 / (num * chance)
        for problem, chance in zip(PROBLEMS, theirs.chances(PROBLEMS), strict=True)
    )
    assert chi2 < 31.3, "the 0.1 % quantile of 11 degrees of freedom"
