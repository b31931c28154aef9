"""The swarm on a virtual clock: every peer gets the file, near the bound, whatever happens to the others."""

from __future__ import annotations

import random

import pytest

from prime_lab.homes import Home, NatKind, draw_homes, fluid_bound_s
from prime_lab.network import Simulation
from prime_lab.simulated_swarm import Result, SimulatedSwarm
from prime_node.broadcast.swarm.choker import ChokerRules

ORIGIN = Home(200, 200, delay_ms=0.2)
SIX = [Home(100, 100, delay_ms=0.2)] * 6


def simulate(homes: list[Home], *, origin: Home = ORIGIN, seed: int = 0, mb: float = 16, **more: object) -> Result:
    settings = {"stride_s": 0.005, "time_s_max": 120.0, "origin_choker": ChokerRules(slots=64)} | more
    return Simulation(SimulatedSwarm(homes, origin, int(mb * 1e6), 128 * 2**10, seed=seed, **settings)).run()  # type: ignore[arg-type]


def test_the_bound_is_the_origin_the_slowest_downlink_or_all_uplinks_together() -> None:
    assert fluid_bound_s(1e6, 8, [Home(8, 80)]) == pytest.approx(1.0)
    assert fluid_bound_s(1e6, 800, [Home(80, 80), Home(80, 4)]) == pytest.approx(2.0)
    assert fluid_bound_s(1e6, 10, [Home(0, 80)] * 5) == pytest.approx(4.0)


def test_no_peer_is_faster_than_the_bound_and_six_equal_peers_come_near_it() -> None:
    found = simulate(SIX, mb=32)
    assert found.unfinished == 0
    assert len(found.done_s) == 6
    assert min(found.done_s) / found.bound_s >= 1.0
    assert found.last_ratio < 1.35
    assert 1.0 <= found.origin_copies < 3.0


def test_one_receiver_takes_what_its_link_takes() -> None:
    found = simulate([Home(10, 50, delay_ms=1)], stride_s=0.001)
    assert 1.0 <= found.last_ratio < 1.1
    assert found.origin_copies == pytest.approx(1.0, abs=0.02)


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    homes = draw_homes(20, random.Random(3))
    first, again, other = (simulate(homes, seed=seed, mb=4, stride_s=0.02) for seed in (1, 1, 2))
    assert first == again
    assert first.done_s != other.done_s


def test_peers_that_leave_and_join_do_not_keep_others_from_finishing() -> None:
    homes = draw_homes(30, random.Random(5), churn=0.3, churn_s=5.0)
    found = simulate(homes, origin=Home(300, 300), mb=8, stride_s=0.02)
    assert found.unfinished == 0
    assert len(found.done_s) == 30
    assert len(homes) == 39


def test_peers_behind_nats_that_nothing_punches_still_get_everything() -> None:
    homes = [Home(50, 100, delay_ms=1, nat=NatKind.HOME)] * 5
    found = simulate(homes, mb=8, punched_share=0.0)
    assert found.unfinished == 0
    assert found.origin_copies == pytest.approx(5.0, abs=0.1)


def test_a_third_behind_nats_costs_little() -> None:
    homes = [Home(100, 100, 0.2, NatKind.PUBLIC if index % 3 else NatKind.HOME) for index in range(12)]
    assert simulate(homes, mb=24, punched_share=0.0).last_ratio < 1.6


def test_an_origin_whose_uplink_is_short_sends_little_more_than_one_copy() -> None:
    homes = [Home(100, 100, delay_ms=0.2)] * 8
    found = simulate(homes, origin=Home(20, 20, delay_ms=0.2), mb=8)
    assert found.origin_copies < 1.5
    assert found.last_ratio < 1.5
