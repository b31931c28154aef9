"""One trained world for all tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.adversaries.arena import Arena
from tests.adversaries.policies import make_policies

SHAPE = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "intermediate_size": 128}
SMALL = {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="session")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    folder: Path = tmp_path_factory.mktemp("arena")
    policies = asyncio.run(
        make_policies(folder, shape=SHAPE, small_shape=SMALL, taught_steps=60, small_steps=40, rl_steps=13)
    )
    made = Arena(policies, folder)
    yield made
    asyncio.run(made.close())
