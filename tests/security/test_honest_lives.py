"""All statistics and thresholds together hurt no honest worker. The bench runs the full size."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """Load scripts/bench/honest_lives.py."""
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("bench_honest_lives", BENCH / "honest_lives.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCH))
    return module


@pytest.fixture(scope="module")
def kinds(bench: ModuleType) -> list[Any]:
    found: list[Any] = bench.kinds()
    return found


@pytest.mark.parametrize("number", range(13))
def test_no_honest_worker_is_hurt_by_all_statistics_together(bench: ModuleType, kinds: list[Any], number: int) -> None:
    kind = kinds[number]
    lived = bench.live(kind, bench.pool_of(kind, 3_000, number), workers=20, rollouts=480, seed=number)
    assert lived.highest.max() < math.log(1e5) / 2
    assert not kind.moments or lived.strikes.sum() == 0
    assert lived.checked < 1e-6, "the lives are folded as the coordinator folds them"


def test_the_simulation_finds_claims_that_are_moved(bench: ModuleType, kinds: list[Any]) -> None:
    """A shift of one nat per completion in the two statistics of shading bans every worker."""
    kind = kinds[2]
    pool = bench.pool_of(kind, 3_000, 1)
    for sums in (pool.log_e[bench.SHADING], pool.of_class):
        sums += 1.0
    assert (bench.live(kind, pool, workers=20, rollouts=480, seed=1).highest > math.log(1e5)).all()
