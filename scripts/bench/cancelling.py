"""Tokens that are generated and discarded at lags of 2 and 4 with long tails, with and without cancelling.

    python scripts/bench/cancelling.py [--quick] [--json]

The coordinator's own state machine on a virtual clock (lab/prime_lab/world.py) with the schedule of prime-rl (`prime_rl_lag1`,
keys and values kept at a swap) and its sweep of old groups: 64 groups of 8 completions a step, 8 workers with 96 places, 40
tokens a second and place. A completion has 1,200 tokens in the mean: lognormal, half of its variance from its prompt, capped
at 8 times the mean. A group that is leased again gets other lengths. A step trains for 25 s, heartbeats come every 5 s.

Discarded: the completions of groups that were dropped as stale, what cancelled leases had generated, and what is in flight at
the end. The baseline, in the same run, is the same scenario without cancelling. The tokens have no bar: the permits of
cancelled leases start other groups at once, so a step ends earlier and the engines generate more in it.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from dataclasses import dataclass, replace

from checks import Check, Output, at_most

from prime_lab.scenario import Costs, Scenario
from prime_lab.world import SimulatedRun
from prime_protocol.schedule import Schedule

GROUPS, SIZE, WORKERS, PLACES = 64, 8, 8, 96
TOKENS_PER_S, MEAN_TOKENS, SIGMA, CAP = 40.0, 1_200.0, 1.1, 8.0
TRAIN_S = 25.0


class Lengths:
    """Seconds of each completion in its place, other ones each time that its group is begun."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.begun: Counter[int] = Counter()
        self.newest: dict[int, float] = {}
        """Seconds of all completions of a slot's newest lease."""

    def seconds(self, slot: int, number: int) -> float:
        """Return the seconds of a completion; the engine asks once for each, in order."""
        if number == 0:
            self.begun[slot] += 1
            self.newest[slot] = 0.0
        prompt = random.Random(f"{self.seed} {slot}").gauss(0.0, 1.0)
        own = random.Random(f"{self.seed} {slot} {number} {self.begun[slot]}").gauss(0.0, 1.0)
        share = math.exp(SIGMA * (prompt + own) / math.sqrt(2) - SIGMA**2 / 2)
        seconds = min(share, CAP) * MEAN_TOKENS / TOKENS_PER_S
        self.newest[slot] += seconds
        return seconds


class Counting(SimulatedRun):
    """A run that adds up the tokens of groups that were dropped."""

    def __init__(self, scenario: Scenario, lengths: Lengths) -> None:
        super().__init__(scenario)
        self.lengths = lengths

    @property
    def trained_s(self) -> float:
        """Seconds of places behind the groups that were trained."""
        return sum(self.lengths.newest[slot] for slot in range(self.scenario.num_steps * GROUPS))


@dataclass(frozen=True, slots=True)
class Row:
    """Result of one run."""

    lag: int
    cancels: bool
    generated: float
    discarded: float
    num_dropped: int
    num_cancelled: int
    step_s: float

    @property
    def share(self) -> float:
        """Share of the generated tokens that was discarded."""
        return self.discarded / self.generated


def run(lag: int, num_steps: int, seed: int, *, cancels: bool) -> Row:
    lengths = Lengths(seed)
    scenario = Scenario(
        Schedule.model_validate({"preset": "prime_rl_lag1", "max_off_policy_steps": lag}),
        async_level=0,
        groups_per_step=GROUPS,
        num_steps=num_steps,
        num_workers=WORKERS,
        group_seconds=lambda slot: MEAN_TOKENS / TOKENS_PER_S,
        train_seconds=lambda step, slots: TRAIN_S,
        broadcast_seconds=5.0,
        costs=replace(Costs(), validators=16),
        slots=PLACES,
        completion_seconds=lengths.seconds,
        cancels=cancels,
    )
    world = Counting(scenario, lengths)
    world.run()
    generated_s = sum(engine.used_s(0.0, world.time.now_s) for engine in world.engines)
    return Row(
        lag,
        cancels,
        generated_s * TOKENS_PER_S,
        (generated_s - world.trained_s) * TOKENS_PER_S,
        len(world.dropped),
        sum(step.wasted["cancelled"] for step in world.steps),
        world.published_s[-1] / num_steps,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and fewer steps: below a minute")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    output, checks = Output(as_json=options.json), list[Check]()
    seeds, num_steps = ((7,), 12) if options.quick else ((7, 8, 9), 40)
    print("lag  seed  cancelled  generated  discarded  share  groups dropped  leases cancelled  step s")
    for lag in (2, 4):
        tokens, seconds = list[float](), list[float]()
        for seed in seeds:
            before, after = (run(lag, num_steps, seed, cancels=cancels) for cancels in (False, True))
            for row in (before, after):
                print(
                    f"{row.lag:3}  {seed:4}  {'yes' if row.cancels else 'no':9}  {row.generated:9.0f}  "
                    f"{row.discarded:9.0f}  {row.share:5.1%}  {row.num_dropped:14}  {row.num_cancelled:16}  {row.step_s:6.1f}"
                )
            tokens.append(after.discarded / before.discarded)
            seconds.append(after.step_s / before.step_s)
        print(f"lag {lag}: tokens discarded, with over without cancelling: {min(tokens):.3f} to {max(tokens):.3f}")
        worst = "worst seed of the time of a step, with over without cancelling"
        checks.append(at_most(f"lag {lag}: {worst}", max(seconds), 1.0))
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
