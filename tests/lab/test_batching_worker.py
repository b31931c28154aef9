"""Simulated workers whose engines generate several leases side by side."""

from __future__ import annotations

import random

import pytest

from prime_lab.scenario import Costs, Scenario
from prime_lab.world import SimulatedRun
from prime_node.coordinator.state import invariants
from prime_protocol.schedule import Schedule, SwapPolicy

STEPS, GROUPS, GROUP, WORKERS, SLOTS = 8, 64, 8, 2, 32


def seconds_of(slot: int, number: int) -> float:
    return min(random.Random(100 * slot + number).lognormvariate(2.0, 0.8), 40.0)


@pytest.mark.parametrize(("swap", "used_min"), [(SwapPolicy.KEEP_KV, 0.95), (SwapPolicy.DRAIN, 0.5)])
def test_engines_are_kept_full_and_no_group_is_too_old(swap: SwapPolicy, used_min: float) -> None:
    run = SimulatedRun(
        Scenario(
            Schedule(swap=swap),
            async_level=2,
            groups_per_step=GROUPS,
            num_steps=STEPS,
            num_workers=WORKERS,
            group_seconds=lambda slot: max(seconds_of(slot, number) for number in range(GROUP)),
            train_seconds=lambda step, chosen: 1.0,
            costs=Costs(swap=0.2),
            groups_per_lease=2,
            slots=SLOTS,
            completion_seconds=seconds_of,
        )
    )
    run.run()
    invariants.check_invariants(run.state)
    assert sum(step.lags.total() for step in run.steps) == STEPS * GROUPS
    assert max(lag for step in run.steps for lag in step.lags) <= 2
    begin_s, end_s = run.published_s[1], run.published_s[-4]
    used_s = sum(engine.used_s(begin_s, end_s) for engine in run.engines)
    assert used_s > used_min * WORKERS * SLOTS * (end_s - begin_s)
