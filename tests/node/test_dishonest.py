"""A cheating engine really samples from other weights, and the numbers show it."""

from __future__ import annotations

import numpy as np
import pytest
from tests.node.table_engine import STOP_TOKEN, TableEngine, table_weights

from prime_node.ports.engine import GenerateRequest
from prime_node.sim.dishonest import Cheat, DishonestEngine, altered
from prime_protocol.assignment import Sampling
from prime_protocol.weights import WeightTensor, root_of

SAMPLING = Sampling(completion_tokens_max=8, stop_token_ids=(STOP_TOKEN,))
REQUESTS = [GenerateRequest((1,), seed) for seed in range(64)]


async def test_an_altered_policy_gives_other_logprobs() -> None:
    honest, cheat = TableEngine(), DishonestEngine(TableEngine(), Cheat.ALTERED)
    for engine in (honest, cheat):
        await engine.load(table_weights(1), policy_version=0)
    truth, claimed = await honest.generate(REQUESTS, SAMPLING), await cheat.generate(REQUESTS, SAMPLING)
    first = np.array([[c.logprobs[0] for c in truth], [c.logprobs[0] for c in claimed]])
    assert np.abs(first[0] - first[1]).mean() > 0.01


async def test_a_stale_engine_keeps_its_first_policy() -> None:
    inner = TableEngine()
    cheat = DishonestEngine(inner, Cheat.STALE)
    await cheat.load(table_weights(1), policy_version=0)
    await cheat.load(table_weights(2), policy_version=1)
    honest = TableEngine()
    await honest.load(table_weights(1), policy_version=0)
    assert inner.loaded == [0]
    assert await cheat.generate(REQUESTS, SAMPLING) == await honest.generate(REQUESTS, SAMPLING)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_altering_changes_float_weights_and_leaves_the_original_alone(dtype: str) -> None:
    values = np.linspace(-1, 1, 100, dtype=np.float32).view(np.uint32)
    data = values if dtype == "fp32" else (values >> 16).astype(np.uint16)
    weights = {"w": WeightTensor(dtype, (100,), data)}
    root = root_of(weights)
    assert root_of(altered(weights, share=0.1, rng=np.random.default_rng(1))) != root
    assert root_of(weights) == root


def test_altering_leaves_integers_alone() -> None:
    weights = {"w": WeightTensor("i32", (2,), np.array([1, 2], np.uint32))}
    assert altered(weights, share=0.1, rng=np.random.default_rng(1)) == weights
