"""Faults of a simulated run as a list that a seed gives, and the smallest part of a list that still fails."""

from __future__ import annotations

import argparse
import logging
import random
import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

FAULTY_S = 40.0
"""Time in which faults begin."""
PAUSE_S = 3.0
"""Mean time between two of them."""
ALONE = ("crash", "crash", "cut off", "slow disk", "clock", "peer's clock", "rot", "clock and crash")
PAIRED = (*ALONE, "stop", "stop", "no database")
"""Kinds of faults of one coordinator, and of a leader with a standby."""


@dataclass(frozen=True)
class Fault:
    """One fault. Example: Fault(3.2, "clock", 0, 8.0, -1_800.0), half an hour back for 8 seconds."""

    at_s: float
    kind: str
    who: int
    """Number of the peer or coordinator that it concerns."""
    seconds: float
    amount: float
    """Seconds of a clock, from -3,600 to 3,600."""

    def __str__(self) -> str:
        return f"{self.at_s:.1f} s: {self.kind} of {self.who} for {self.seconds:.1f} s, {self.amount:.0f} s"


NOISE = Fault(0.0, "lost and repeated messages", 0, 0.0, 0.0)
"""What the network does all the time. First in each list, so that it can be left out too."""


def draw_faults(seed: int, kinds: Sequence[str]) -> list[Fault]:
    """Return the faults of a seed. They may overlap."""
    drawn, faults, at_s = random.Random(f"faults {seed}"), [NOISE], 0.0
    while (at_s := at_s + drawn.expovariate(1 / PAUSE_S)) < FAULTY_S:
        kind = drawn.choice(kinds)
        seconds = drawn.uniform(0.0, 30.0 if kind == "cut off" else 6.0)
        faults.append(Fault(at_s, kind, drawn.randrange(4), seconds, drawn.uniform(-3_600.0, 3_600.0)))
    return faults


def shrink(numbers: Collection[int], fails: Callable[[Collection[int]], bool]) -> list[int]:
    """Return a smallest part of a failing list: without any one of them it does not fail."""
    kept = list(numbers)
    size = (len(kept) + 1) // 2
    while size:
        place = 0
        while place < len(kept):
            fewer = kept[:place] + kept[place + size :]
            if fails(fewer):
                kept = fewer
            else:
                place += size
        size //= 2
    return kept


@dataclass(frozen=True)
class Simulation:
    """A simulated run of a seed."""

    module: str
    """Name of its module, whose command repeats a seed."""
    faults_of: Callable[[int], Sequence[Fault]]
    simulate: Callable[..., object]
    """Function of (seed, numbers of the faults that take place or None for all, say). Raises what fails."""

    def failing(self, seed: int, only: Collection[int] | None = None) -> Exception | None:
        """Return what fails, if anything."""
        try:
            self.simulate(seed, only)
        except Exception as error:  # noqa: BLE001 (each one is a finding)
            return error
        return None

    def run_or_shrink(self, seed: int) -> None:
        """Run one seed. What it raises names the fewest faults that still fail, and the command that repeats them."""
        if (error := self.failing(seed)) is None:
            return
        faults = self.faults_of(seed)
        kept = shrink(range(len(faults)), lambda numbers: self.failing(seed, numbers) is not None)
        error = self.failing(seed, kept) or error
        error.add_note(f"python -m {self.module} {seed} --only {','.join(map(str, kept)) or 'none'}")
        for number in kept:
            error.add_note(f"    {faults[number]}")
        raise error


def run_seeds(simulation: Simulation) -> None:
    """Run the seeds of the command line. The exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(prog=f"python -m {simulation.module}")
    parser.add_argument("seed", type=int)
    parser.add_argument("--only", help="numbers of the faults that take place, with commas; none: no fault")
    parser.add_argument("--to", type=int, help="run all seeds from the first to before this one")
    given = parser.parse_args()
    if given.to is None:
        logging.basicConfig(level=logging.INFO)
        only = None if given.only is None else [int(one) for one in given.only.split(",") if one != "none"]
        print(simulation.simulate(given.seed, only, print))
        return
    logging.disable(logging.CRITICAL)
    failed = 0
    for seed in range(given.seed, given.to):
        try:
            simulation.run_or_shrink(seed)
        except Exception as error:  # noqa: BLE001 (each one is a finding)
            failed += 1
            traceback.print_exception(error, limit=-3, chain=False)
    print(f"{given.to - given.seed} seeds, {failed} failed")
    sys.exit(failed > 0)
