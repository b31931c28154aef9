"""The worker's settings decide the arithmetic of its engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.batch_coordinator import make_run, write_model

from prime_node.cli import wire
from prime_node.worker.config import WorkerConfig


@pytest.mark.parametrize(("dtype", "expected"), [("auto", "fp32"), ("fp32", "fp32"), ("bf16", "bf16")])
def test_the_arithmetic_of_an_engine_on_a_cpu_is_a_setting(tmp_path: Path, dtype: str, expected: str) -> None:
    settings = WorkerConfig.load({"worker": {"engine": "transformers", "dtype": dtype}})
    engine = wire.engine(settings, write_model(tmp_path), make_run(), cheat=None)
    assert (engine.info.name, engine.info.dtype, engine.info.device) == ("transformers", expected, "cpu")


@pytest.mark.vllm
@pytest.mark.parametrize(("dtype", "expected"), [("auto", "fp32"), ("bf16", "bf16")])
def test_so_is_that_of_vllm(tmp_path: Path, dtype: str, expected: str) -> None:
    settings = WorkerConfig.load({"worker": {"engine": "vllm", "dtype": dtype}})
    engine = wire.engine(settings, write_model(tmp_path), make_run(), cheat=None)
    assert (engine.info.name, engine.info.dtype) == ("vllm", "bf16" if engine.info.device == "cuda" else expected)
