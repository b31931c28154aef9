"""The queue and its thread give the proofs that rows give when they are added directly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable, Sequence

import pytest
import torch

from prime_node.adapters.engines.hidden_rows import HiddenRows
from prime_node.adapters.engines.queued_rows import QueuedRows

LENGTHS: dict[Hashable, int] = {"a": 75, "b": 1, "c": 32, "d": 130, "e": 33}


async def taken(rows: QueuedRows, lengths: Sequence[tuple[Hashable, int]]) -> dict[Hashable, bytes]:
    found: dict[Hashable, bytes] = {}
    while missing := [(name, length) for name, length in lengths if name not in found]:
        answers = zip(missing, rows.take(missing), strict=True)
        found |= {name: proof for (name, _), proof in answers if proof is not None}
        await asyncio.sleep(0)
    return found


async def test_the_thread_gives_the_same_proofs_in_any_mixture_of_completions() -> None:
    direct, queued = HiddenRows(), QueuedRows()
    shuffle = random.Random(0)
    for step in range(max(LENGTHS.values()) + 2):  # an engine computes rows past the end
        names: list[Hashable] = [name for name, length in LENGTHS.items() if step <= length]
        names.append(None)
        shuffle.shuffle(names)
        hidden = torch.randn(len(names), 48, generator=torch.Generator().manual_seed(step))
        direct.add(names, [step] * len(names), hidden)
        queued.add(names, [step] * len(names), hidden)
        hidden.zero_()  # an engine reuses the memory
    assert await taken(queued, list(LENGTHS.items())) == direct.take(LENGTHS)
    assert await taken(queued, [("a", 0)]) == {"a": b""}, "nothing is kept"


async def test_dropped_completions_are_forgotten() -> None:
    queued, hidden = QueuedRows(), torch.randn(1, 48)
    for step in range(40):
        queued.add(["kept"], [step], hidden)
        queued.add(["dropped"], [step], hidden)
    queued.drop(["dropped", "unknown"])
    found = await taken(queued, [("dropped", 0), ("kept", 40)])
    assert found["dropped"] == b""
    assert len(found["kept"]) == 2 * 258


async def test_an_error_in_the_thread_reaches_the_engine() -> None:
    queued = QueuedRows()
    queued.add(["a"], [0], torch.zeros(1, 48))
    with pytest.raises(KeyError, match="1"):
        await taken(queued, [("a", 3)])  # rows 1 and 2 are missing
