"""An engine with a model of random weights that is small enough for any test."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights, tiny_model_files


@contextlib.asynccontextmanager
async def tiny_engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    """Write a model's files, and load its weights as policy 0."""
    for name, data in tiny_model_files(hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64).items():
        (folder / name).write_bytes(data)
    made = TransformersEngine(folder)
    await made.load(initial_weights(folder, 0), policy_version=0)
    yield made
    await made.close()
