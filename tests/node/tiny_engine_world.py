"""An engine with a model of random weights that is small enough for any test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights


@contextlib.asynccontextmanager
async def tiny_engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    """Write a model's files, and load its weights as policy 0."""
    write_tiny_model(folder, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)
    made = TransformersEngine(folder)
    await made.load(initial_weights(folder, 0), policy_version=0)
    yield made
    await made.close()
