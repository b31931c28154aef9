"""The planner's closed form compared with manual calculations, and its consequences."""

from __future__ import annotations

import itertools

import pytest

from prime_lab.planner import SHAPES, Load, Machine, Shape, model_flops, plan, state_bytes

TINY = Shape(parameters=1e9, layers=10, hidden=1_000, vocab=10_000)
LOAD = Load(tokens=1_000_000, sequence_tokens=1_000, pass_tokens=10_000, recompute=False)
MACHINE = Machine(flops_max=1e14, efficiency=0.5, memory_bytes_s=1e12, node_bytes_s=1e11, network_bytes_s=1e10)


def test_a_plan_worked_out_by_hand() -> None:
    found = plan(TINY, 10, LOAD, MACHINE)
    assert model_flops(TINY, LOAD) == pytest.approx((6e9 + 6e7) * 1e6)
    assert found.compute_s == pytest.approx(6.06e15 / (10 * 5e13))
    assert found.passes == 10
    assert found.traffic_s == pytest.approx(10 * 8e9 * 0.9 / 1e10)
    assert found.wait_s == pytest.approx(found.traffic_s / (10 * 11))
    assert state_bytes(TINY.parameters, 10) == 2.0e9
    layer, root = (1e9 - 2e7) / 10, 2e7
    activations = 34 * 10 * 1_000 * 10_000
    assert found.memory_bytes == pytest.approx(2.0e9 + 10 * layer + 2 * root + activations + 12 * 2**24)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_more_gpus_are_faster_and_hold_less_each(name: str) -> None:
    plans = [plan(SHAPES[name], gpus) for gpus in (8, 16, 32, 64, 128, 256)]
    for fewer, more in itertools.pairwise(plans):
        assert fewer.step_s / 2 <= more.step_s < fewer.step_s
        assert more.memory_bytes < fewer.memory_bytes
        assert more.copy_s == pytest.approx(fewer.copy_s / 2)


def test_recomputing_trades_a_third_of_the_arithmetic_for_memory() -> None:
    kept, again = (plan(SHAPES["8B"], 8, Load(recompute=recompute)) for recompute in (False, True))
    assert again.compute_s == pytest.approx(4 / 3 * kept.compute_s)
    assert again.memory_bytes < kept.memory_bytes
