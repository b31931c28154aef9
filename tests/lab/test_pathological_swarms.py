"""Swarms in which much is wrong, simulated: each one completes within a stated factor of its bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from prime_lab.homes import BYTES_PER_MBIT, Home, NatKind, draw_homes
from prime_lab.network import Simulation
from prime_lab.simulated_swarm import SimulatedSwarm
from prime_node.broadcast.swarm.choker import ChokerRules

HOME = Home(20, 50, delay_ms=10)
ORIGIN = Home(100, 100, delay_ms=10)


def some_leave(homes: list[Home], at_s: float) -> list[Home]:
    return [replace(home, leaves_s=at_s) if number % 2 else home for number, home in enumerate(homes)]


def some_lie(homes: list[Home]) -> list[Home]:
    return [replace(home, is_liar=number % 5 < 2) for number, home in enumerate(homes)]


CASES: dict[str, tuple[Callable[[], tuple[list[Home], Home]], float]] = {
    "one source only: peers upload next to nothing": (lambda: ([replace(HOME, up_mbit=0.2)] * 12, ORIGIN), 2.8),
    "all behind a symmetric NAT": (lambda: ([replace(HOME, nat=NatKind.SYMMETRIC)] * 12, ORIGIN), 1.2),
    "one peer has 100 times the others": (lambda: ([Home(500, 500, 10), *[Home(5, 25, 10)] * 15], ORIGIN), 2.2),
    "half leave in the middle": (lambda: (some_leave([HOME] * 20, 1.1), ORIGIN), 1.6),
    "two of five lie": (lambda: (some_lie([HOME] * 20), ORIGIN), 1.7),
    "an origin of 2 Mbit/s": (lambda: ([HOME] * 12, Home(2, 2, 10)), 1.25),
    "200 ms there and back": (lambda: ([replace(HOME, delay_ms=50)] * 12, replace(ORIGIN, delay_ms=50)), 1.8),
    "all of it": (lambda: (some_leave(some_lie(draw_homes(40, random.Random(1))), 1.6), Home(20, 20, 50)), 3.5),
}
"""Homes, origin, and the factor: a tenth above what was measured over three seeds."""
FILE_BYTES = 8_000_000


@pytest.mark.parametrize("case", CASES)
def test_a_swarm_completes_near_its_bound_though_much_is_wrong(case: str) -> None:
    make, factor = CASES[case]
    homes, origin = make()
    origin_choker = ChokerRules(slots=64)
    world = SimulatedSwarm(
        homes, origin, FILE_BYTES, 2**16, origin_is_peer=True, time_s_max=300.0, origin_choker=origin_choker
    )
    found = Simulation(world).run()
    bound_s = found.bound_s
    if all(home.nat is NatKind.SYMMETRIC for home in homes):  # each has the origin alone
        bound_s = len(homes) * FILE_BYTES / (origin.up_mbit * BYTES_PER_MBIT)
    assert found.unfinished == 0
    assert max(found.done_s) <= factor * bound_s
