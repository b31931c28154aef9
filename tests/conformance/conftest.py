"""Fixtures of the tests of engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.conformance.engine_world import peaked_weights, write_model

from prime_protocol.weights import Weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model's files."""
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def policies(folder: Path) -> list[Weights]:
    """Return two policies of that model."""
    return [peaked_weights(folder, seed) for seed in (1, 2)]
