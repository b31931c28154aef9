"""Many seeds of machines that follow a run and serve each other, with crashes, rot, changed answers and wrong clocks."""

from __future__ import annotations

import pytest
from tests.node.seeded_swarm_world import SWARM, simulate_swarm

SEEDS = 16


@pytest.mark.slow
def test_each_machine_gets_each_policy_whatever_fails() -> None:
    for seed in range(SEEDS):
        SWARM.run_or_shrink(seed)


def test_a_seed_of_a_swarm_gives_the_same_run_each_time() -> None:
    first, second = simulate_swarm(4), simulate_swarm(4)
    assert first.num_asked == second.num_asked > 100
    assert first.faults == second.faults
