"""Fixtures that several files of this folder use."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.renderer_world import qwen3_model
from tests.tiny_model_world import write_tiny_model


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the special tokens of Qwen3."""
    return qwen3_model(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16
    )
