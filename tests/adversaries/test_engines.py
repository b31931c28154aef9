"""Cheating engines behave as declared, observed from outside, with the smallest real language model."""

from __future__ import annotations

import numpy as np
import pytest
from tests.node.table_engine import STOP_TOKEN, TableEngine, table_weights

from prime_lab.adversaries.table import ADVERSARIES
from prime_node.ports.engine import GenerateRequest
from prime_node.worker.cheats import STANDALONE, cheating_engine, mapped, quantised
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion
from prime_protocol.weights import WeightTensor, root_of

SAMPLING = Sampling(completion_tokens_max=8, stop_token_ids=(STOP_TOKEN,))
REQUESTS = [GenerateRequest((1,), seed) for seed in range(64)]


async def completions_of(cheat: str | None, *policies: int, honest_loads: int = 0) -> list[Completion]:
    """Return a worker's answer after it got these policies one after another."""
    engine = TableEngine() if cheat is None else cheating_engine(TableEngine(), cheat, honest_loads=honest_loads)
    for version, policy in enumerate(policies):
        await engine.load(table_weights(policy), policy_version=version)
    return await engine.generate(REQUESTS, SAMPLING)


@pytest.mark.parametrize("cheat", STANDALONE)
async def test_a_cheat_answers_otherwise_than_an_honest_worker(cheat: str) -> None:
    policies = range(10)
    assert await completions_of(cheat, *policies) != await completions_of(None, *policies)


@pytest.mark.parametrize("cheat", STANDALONE)
async def test_a_cheat_is_honest_for_the_configured_time(cheat: str) -> None:
    assert await completions_of(cheat, 0, 1, 2, honest_loads=3) == await completions_of(None, 0, 1, 2)


@pytest.mark.parametrize(("cheat", "policy"), [("older-1", 8), ("older-2", 7), ("older-8", 1), ("stale", 0)])
async def test_an_older_policy_is_the_declared_one(cheat: str, policy: int) -> None:
    assert await completions_of(cheat, *range(10)) == await completions_of(None, policy)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_changing_weights_leaves_the_original_alone(dtype: str) -> None:
    values = np.linspace(-1, 1, 100, dtype=np.float32).view(np.uint32)
    data = values if dtype == "fp32" else (values >> 16).astype(np.uint16)
    weights = {"w": WeightTensor(dtype, (100,), data), "n": WeightTensor("i32", (2,), np.array([1, 2], np.uint32))}
    root = root_of(weights)
    changed = mapped(weights, lambda values: values * 2)
    assert root_of(changed) != root
    assert root_of(weights) == root
    assert changed["n"] is weights["n"]


def test_rounding_has_the_declared_number_of_levels() -> None:
    values = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    found = quantised(values, group=32, largest=7)
    assert max(len(np.unique(group)) for group in found.reshape(-1, 32)) <= 15
    assert np.abs(found - values).max() <= np.abs(values).max() / 14 + 1e-6


def test_an_unknown_cheat_is_the_users_mistake_and_the_known_ones_are_named() -> None:
    with pytest.raises(LocalError, match="choose one of altered, stale"):
        cheating_engine(TableEngine(), "kind", honest_loads=0)


def test_every_cheat_has_a_description() -> None:
    assert all(cheat.idea.endswith(".") for cheat in ADVERSARIES.values())
