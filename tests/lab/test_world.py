"""Whole runs on the virtual clock through the coordinator's scheduler: they end, obey the rule, and lose little time."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from prime_lab.scenario import Costs, Scenario
from prime_lab.world import SimulatedRun
from prime_node.coordinator.state import invariants
from prime_protocol.schedule import PRESETS, Schedule

STEPS, GROUPS, WORKERS = 8, 32, 8
FREE = Costs(request=0.0, upload=0.0, check=0.0, swap=0.0, recompute_share=0.0, retry=0.2)


def ran(
    settings: dict[str, object],
    *,
    k: int = 0,
    train_s: float = 100.0,
    broadcast_s: float = 0.0,
    costs: Costs = FREE,
    sigma: float = 1.0,
    leases_ahead: int = 0,
) -> SimulatedRun:
    rng = random.Random(3)
    trace = [rng.lognormvariate(3.0, sigma) for _ in range(STEPS * GROUPS)]
    schedule = Schedule.model_validate(settings)
    world = SimulatedRun(
        Scenario(
            schedule,
            async_level=k,
            groups_per_step=GROUPS,
            num_steps=STEPS,
            num_workers=WORKERS,
            group_seconds=trace.__getitem__,
            train_seconds=lambda step, slots: train_s / schedule.batches_per_step,
            broadcast_seconds=broadcast_s,
            costs=costs,
            leases_ahead=leases_ahead,
        )
    )
    world.run()
    return world


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("leases_ahead", [0, 1])
def test_every_preset_trains_all_its_groups_and_ends(preset: str, leases_ahead: int) -> None:
    world = ran({"preset": preset}, k=2, broadcast_s=50.0, costs=Costs(), leases_ahead=leases_ahead)
    assert world.state.head == STEPS
    assert sum(step.lags.total() for step in world.steps) == STEPS * GROUPS
    assert all(later > earlier for earlier, later in pairwise(world.published_s))
    invariants.check_invariants(world.state)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_in_order_no_group_is_ever_more_than_k_behind_and_none_is_dropped(k: int) -> None:
    world = ran({}, k=k, broadcast_s=30.0, costs=Costs(), leases_ahead=1)
    assert max(lag for step in world.steps for lag in step.lags) == k
    assert world.state.num_dropped_groups == 0


@pytest.mark.parametrize("settings", [{}, {"preset": "verl_stream"}, {"preset": "areal"}])
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("broadcast_s", [0.0, 80.0])
def test_where_the_work_around_the_work_costs_nothing_nothing_is_lost(
    settings: dict[str, object], k: int, broadcast_s: float
) -> None:
    world = ran(settings, k=k, broadcast_s=broadcast_s)
    measured = [at_s - world.published_s[0] - broadcast_s for at_s in world.published_s[1:]]
    assert measured == pytest.approx(world.replayed_s(), rel=0.01)


def test_two_policies_behind_hide_the_broadcast_where_one_does_not() -> None:
    # G = T = b, and almost no tail: the rule predicts 1.5 G per step with k = 1, and G with k = 2
    steps = {}
    for k in (0, 1, 2):
        world = ran({}, k=k, train_s=85.0, broadcast_s=85.0, sigma=0.02)
        steps[k] = (world.published_s[-1] - world.published_s[3]) / (STEPS - 3)
    assert steps[0] == pytest.approx(3 * 85, rel=0.05)
    assert steps[1] == pytest.approx(1.5 * 85, rel=0.08)
    assert steps[2] == pytest.approx(85, rel=0.05)


def test_a_swap_under_way_makes_completions_of_several_policies() -> None:
    kept = ran({"staleness_threshold": 1.0, "swap": "keep_kv", "staleness_from": "end"}, costs=Costs())
    drained = ran({"staleness_threshold": 1.0}, costs=Costs())
    lag_of = {name: sum(lag * n for s in world.steps for lag, n in s.lags.items()) for name, world in
              {"kept": kept, "drained": drained}.items()}  # fmt: skip
    assert lag_of["kept"] < lag_of["drained"]
