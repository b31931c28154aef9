"""Measurements for calibrations: they resume from what is kept, and the engines start only if something is missing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.cli.measuring import MeasuredPieces, Measurement, MeasurementPlan, MeasurementProgress
from prime_node.cli.wire_classes import class_of_kind, worker_kind
from prime_node.cli.wire_measurement import random_model
from prime_node.validator.calibrating import LeaseSeries, random_prompts
from prime_node.validator.config import ValidatorConfig
from prime_node.worker.config import WorkerConfig
from prime_protocol.assignment import Sampling

PROMPTS = random_prompts(16, vocab_size=264, tokens_max=8, seed=1)
SERIES = LeaseSeries(PROMPTS, Sampling(completion_tokens_max=8, stop_token_ids=()), long_tokens_max=16)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MeasurementPlan:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = random_model(tmp_path)
    return MeasurementPlan(
        folder=folder,
        weights=initial_weights(folder, 1),
        series=SERIES,
        sampler="transformers/fp32",
        judges=["transformers/fp32"],
        tokens=2_000,
    )


async def test_an_interrupted_measurement_continues_from_the_leases_that_it_finished(plan: MeasurementPlan) -> None:
    reached = asyncio.Event()

    def stop_early(progress: MeasurementProgress) -> None:
        if progress.num_tokens >= 500:
            reached.set()

    first = asyncio.create_task(Measurement(plan, on_progress=stop_early).measure())
    await asyncio.wait({first, asyncio.create_task(reached.wait())}, return_when=asyncio.FIRST_COMPLETED)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    seen: list[MeasurementProgress] = []
    ((resumed, words),) = await Measurement(plan, on_progress=seen.append).measure()
    assert (resumed.worker, resumed.validator) == ("transformers/fp32/cpu", "transformers/fp32/cpu")
    assert {"margin", "flip", "square", "cooler", "looser"} < set(resumed.moments)
    assert resumed.moments["square"].num_tokens == seen[-1].num_tokens >= 2_000
    assert "judged by transformers/fp32" in words
    assert seen[0].num_tokens == 0
    assert seen[0].seconds_left is None
    ((cached, _),) = await Measurement(replace(plan, folder=Path("/nowhere")), on_progress=seen.append).measure()
    assert cached == resumed, "no engine was started, which would need the folder"


def test_each_piece_is_found_again_only_by_an_equal_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    pieces = MeasuredPieces({"model": "a"})
    pieces.write("honest-0", {"norm": np.array([0.5], np.float32)})
    found = MeasuredPieces({"model": "a"}).read("honest-0")
    assert found is not None
    assert found["norm"].tolist() == [0.5]
    assert MeasuredPieces({"model": "b"}).read("honest-0") is None
    (file,) = pieces.folder.glob("*.npz")
    whole = file.read_bytes()
    for place in range(0, len(whole), 7):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert pieces.read("honest-0") is None, "a damaged piece is measured again"
    file.write_bytes(whole[:-30])
    assert pieces.read("honest-0") is None


def test_leases_of_a_series_are_the_same_each_time_small_large_and_sometimes_long() -> None:
    leases = [SERIES.lease(number) for number in range(4)]
    assert leases == SERIES.first(8 * 8 * (1 + 8 + 2 + 8))
    assert [len(lease.groups) for lease in leases] == [1, 8, 1, 8]
    assert [lease.sampling.completion_tokens_max for lease in leases] == [8, 8, 16, 8]
    used = [group.prompt_token_ids for lease in leases for group in lease.groups]
    assert used == [PROMPTS[number % 16] for number in range(18)], "the prompts are used in turn"
    assert len({seed for lease in leases for group in lease.groups for seed in group.seeds}) == 18 * 8
    assert replace(SERIES, seed=1).digest != SERIES.digest


def test_the_time_left_is_that_of_the_tokens_but_no_more_than_allowed() -> None:
    assert MeasurementProgress(500, 2_000, 10.0, float("inf")).seconds_left == 30.0
    assert MeasurementProgress(500, 2_000, 10.0, 25.0).seconds_left == 15.0
    assert MeasurementProgress(2_500, 2_000, 10.0, 25.0).seconds_left == 0.0


@pytest.mark.parametrize(
    ("worker", "validator", "pair"),
    [
        ({"engine": "vllm", "dtype": "bf16"}, {}, ("vllm/bf16", "transformers/fp32")),
        ({"engine": "transformers"}, {"dtype": "bf16"}, ("transformers/fp32", "transformers/bf16")),
        ({"engine": "vllm", "dtype": "bf16"}, {"engine": "vllm", "dtype": "bf16"}, ("vllm/bf16", "vllm/bf16")),
    ],
)
def test_a_config_names_its_engine_classes(
    worker: dict[str, str], validator: dict[str, str], pair: tuple[str, str]
) -> None:
    found = (
        worker_kind(WorkerConfig.load({"worker": worker})),
        ValidatorConfig.load({"validator": validator}).kind,
    )
    assert found == pair
    assert class_of_kind("transformers/bf16") == "transformers/bf16/cpu"
