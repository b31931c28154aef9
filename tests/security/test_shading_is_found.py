"""Claims that are shifted by reward are detected within 64 audited rollouts of any engine, and no honest worker is hurt."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from prime_protocol.check_policy import EVIDENCE_MAX


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The simulation of scripts/bench/shading.py, whose full size the bench runs."""
    folder = Path(__file__).parents[2] / "scripts" / "bench"
    spec = importlib.util.spec_from_file_location("bench_shading", folder / "shading.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        spec.loader.exec_module(module)
    return module


ENGINES = (
    "the same engine",
    "bf16 beside fp32",
    "unknown, coarse",
    "unknown, flatter",
    "bf16 of a real model",
    "noisy, 0.15 nats",
)


def test_the_simulation_sums_and_folds_as_the_protocol_does(bench: ModuleType) -> None:
    bench.check_against_the_protocol()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("nats", [-0.1, -0.05])
def test_shading_of_rewarded_completions_is_found_within_64_audited_rollouts(
    bench: ModuleType, engine: str, nats: float
) -> None:
    needed = bench.needed(engine, (nats, 0.0), 21, 16, 128, 3)
    assert np.quantile(needed, 0.95, method="higher") <= 64


@pytest.mark.parametrize("engine", ENGINES)
def test_no_honest_worker_comes_near_a_ban(bench: ModuleType, engine: str) -> None:
    highest = bench.honest(engine, 20, 2_000, 16, 5)
    assert highest.max() < math.log(EVIDENCE_MAX) / 2
