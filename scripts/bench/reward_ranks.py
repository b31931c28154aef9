"""Reward ranks: delay until the best of n unseeded samples is detected, and how near honest workers come to a ban.

    python scripts/bench/reward_ranks.py [--quick] [--json]

Rewards are simulated: right or wrong with a probability per problem, or graded so that no two are equal. Groups of 8 are compared
with 8 trusted rollouts each, folded as the coordinator does, with a calibration's seven statistics that show nothing. A ban is
at 1e5. Rollouts are those that were compared: with `reference_share` 0.25, four times as many are uploaded.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from checks import Output, at_most

from prime_protocol.check_policy import EVIDENCE_MAX
from prime_protocol.evidence import Sums, folded, log_evidence
from prime_protocol.reward_ranks import REWARD_RANKS, rank_sums

SIZE = 8
STATISTICS = (*REWARD_RANKS, *(f"of tokens {number}" for number in range(7)))
"""Statistics, as many as in a run with the shipped calibration."""
GROUPS_MAX = 400

Rewards = npt.NDArray[np.float64]
Draw = Callable[[np.random.Generator], Callable[[int], Rewards]]
"""Function that draws a problem and returns a function that draws rewards of it."""


def coin(p: float | None) -> Draw:
    """1 with this probability; None: another one for each problem, Beta(0.8, 1.2)."""

    def problem(rng: np.random.Generator) -> Callable[[int], Rewards]:
        of_problem = rng.beta(0.8, 1.2) if p is None else p
        return lambda num: (rng.random(num) < of_problem).astype(np.float64)

    return problem


def graded(rng: np.random.Generator) -> Callable[[int], Rewards]:
    """Partial credit: no two alike."""
    return rng.random


TASKS: dict[str, Draw] = {
    "right in 5 of 100": coin(0.05),
    "right in 30 of 100": coin(0.3),
    "right in 0 to 100, Beta(0.8, 1.2)": coin(None),
    "graded": graded,
}


@lru_cache(maxsize=10_000)
def sums_of(mine: tuple[float, ...], trusted: tuple[float, ...]) -> dict[str, Sums]:
    return rank_sums([(mine, trusted)])


def evidence_over(draw: Draw, best_of: int, groups: int, seed: int) -> list[float]:
    """Return the nats after each compared group of a worker that uploads the best of `best_of` samples."""
    rng, wealth, logs = np.random.default_rng(seed), folded({}, {}, statistics=STATISTICS), []
    for _ in range(groups):
        sample = draw(rng)
        mine = sample(SIZE * best_of).reshape(SIZE, best_of).max(axis=1)
        pooled = tuple(sorted(mine.tolist())), tuple(sorted(sample(SIZE).tolist()))
        wealth = folded(wealth, sums_of(*pooled), statistics=STATISTICS)
        logs.append(log_evidence(wealth))
        if logs[-1] >= math.log(EVIDENCE_MAX):
            break
    return logs


def rollouts_needed(draw: Draw, best_of: int, workers: int) -> list[float]:
    found = []
    for seed in range(workers):
        logs = evidence_over(draw, best_of, GROUPS_MAX, seed)
        found.append(SIZE * len(logs) if logs[-1] >= math.log(EVIDENCE_MAX) else math.inf)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer workers")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON and nothing else")
    arguments = parser.parse_args()
    output = Output(as_json=arguments.json)
    cheats, honest, groups = (11, 100, 60) if arguments.quick else (41, 1_000, 150)
    table = {
        (task, n): np.quantile(rollouts_needed(draw, n, cheats), (0.5, 0.95), method="higher")
        for task, draw in TASKS.items()
        for n in (2, 3, 4, 8)
    }
    highest = {
        task: [max(evidence_over(draw, 1, groups, 10**6 + seed)) for seed in range(honest)]
        for task, draw in TASKS.items()
        if draw is not graded  # every group is another then, and costs a hundred times as much
    }
    most = max(max(each) for each in highest.values())
    at_ten = float(np.mean([log_m >= math.log(10) for each in highest.values() for log_m in each]))
    found = [
        at_most("honest workers ever at 10, share", at_ten, 0.1),
        at_most("highest evidence of an honest worker, nats", most, 11.5),
    ]
    for n, bar in ((3, 300), (4, 200)):
        median = float(table["right in 30 of 100", n][0])
        found.append(at_most(f"best of {n}, compared rollouts", median, bar))
    print("| rewards | best of 2 | best of 3 | best of 4 | best of 8 |\n|---|---|---|---|---|")
    for task in TASKS:
        cells = (" / ".join(f"{each:.0f}" for each in table[task, n]) for n in (2, 3, 4, 8))
        print(f"| {task} | " + " | ".join(cells) + " |")
    print(f"\nhonest: {len(highest)} x {honest:,} workers of {groups} compared groups")
    return output.finish(found)


if __name__ == "__main__":
    raise SystemExit(main())
