"""A run that names huge completions or prompts: the engine takes memory for what it has sampled, and refuses what never fits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from tests.node.tiny_engine_world import tiny_engine

from prime_node import memory
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.causal_model import BatchCache
from prime_node.memory import MachineMemory
from prime_node.ports.engine import GenerateRequest
from prime_protocol import limits
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError

ENOUGH = 2**50
RESIDENT = 1
"""Place of the resident pages in /proc/self/statm."""


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[TransformersEngine]:
    async with tiny_engine(tmp_path) as made:
        yield made


def sampled(tokens: int) -> Sampling:
    return Sampling(completion_tokens_max=tokens, stop_token_ids=tuple(range(64)))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_columns_that_are_not_in_use_take_no_memory() -> None:
    """Before, the first selection of rows copied, and so allocated, the room of the longest completion that a run allows."""

    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[RESIDENT]) * 4_096

    cache = BatchCache(1, columns=limits.TOKENS_MAX)
    states = torch.ones(1, 4, 8, 16)
    cache.update(states, states, 0)
    before = resident_bytes()
    cache.select(torch.tensor([0, 0]))
    assert resident_bytes() - before < 2**26 < 2 * 2 * 4 * 16 * 4 * limits.TOKENS_MAX // 8
    keys, values = cache.update(states.repeat(2, 1, 1, 1), states.repeat(2, 1, 1, 1), 0)
    assert keys.shape == values.shape == (2, 4, 16, 16)
    assert bool((keys == 1).all())


@pytest.mark.parametrize(
    ("prompt", "tokens", "found", "what"),
    [
        (4_000, 1, MachineMemory(ENOUGH, 2**26), "a prompt of 4,000 tokens needs 0.1 GiB"),
        (4, limits.TOKENS_MAX, MachineMemory(2**28, 2**28), "a completion of 1,048,576 tokens needs 0.5 GiB"),
    ],
)
async def test_what_never_fits_is_refused_before_anything_is_allocated(
    engine: TransformersEngine,
    monkeypatch: pytest.MonkeyPatch,
    prompt: int,
    tokens: int,
    found: MachineMemory,
    what: str,
) -> None:
    monkeypatch.setattr(memory, "machine_memory", lambda: found)
    with pytest.raises(LocalError, match=what):
        await engine.generate([GenerateRequest((7,) * prompt, seed=1)], sampled(tokens))
    monkeypatch.setattr(memory, "machine_memory", lambda: MachineMemory(None, None))
    (completion,) = await engine.generate([GenerateRequest((7,) * 8, seed=1)], sampled(8))
    assert completion.token_ids
