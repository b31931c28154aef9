"""Destinations of the trainer's and the coordinator's rows: gauges for Prometheus, TensorBoard, W&B, utilisation."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.node import coordinator_world
from tests.node.batch_coordinator import make_run
from tests.time_world import wait_until

from prime_node.adapters.prometheus_metrics import PrometheusMetrics
from prime_node.cli import wire_training
from prime_node.cli.wire_rows import rows_in
from prime_node.observe import BestEffort, Gauges, Headlines, read_json_lines
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.rows import line_of, speed


def test_rows_become_gauges() -> None:
    metrics = PrometheusMetrics()
    gauges = Gauges(metrics, prefix="prime_trainer_")
    gauges.record(step=3, loss=0.5, **{"reward_mean/words": 0.25, "reward_mean": 0.3})
    gauges.record(step=4, loss=float("nan"), encodings={"anchor": 3})
    gauges.record(**{"trainer/idle_ratio": 0.125, "fully_async/count/stale_samples_processed": 9, "lag/2": 7})
    gauges.record(**{"lag/1": 5})
    text = metrics.exposition()[0].decode()
    assert "prime_trainer_step 4.0" in text
    assert "prime_trainer_loss 0.5" in text
    assert 'prime_trainer_reward_mean_by_environment{environment="words"} 0.25' in text
    assert "prime_trainer_reward_mean 0.3" in text
    assert "encodings" not in text
    assert "prime_trainer_trainer_idle_ratio 0.125" in text
    assert "prime_trainer_fully_async_count_stale_samples_processed 9.0" in text
    assert 'prime_trainer_lag_by_policies{policies="1"} 5.0' in text
    assert 'prime_trainer_lag_by_policies{policies="2"} 0.0' in text  # the newest row has none of them


async def test_rows_are_in_the_file_and_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    config = TrainerConfig(metrics_port=0)
    async with wire_training.trainer_rows(config, make_run(), tmp_path) as rows:
        rows.record(step=7, loss=1.5)
        address = next(word for word in caplog.text.split() if word.startswith("http://"))
        body = await asyncio.to_thread(lambda: urllib.request.urlopen(address, timeout=5).read().decode())
        rows.close()
    assert "prime_trainer_step 7.0" in body
    assert [row["loss"] for row in read_json_lines(tmp_path / "metrics.jsonl")] == [1.5]


def test_rows_are_logged_as_lines_every_few_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    row = {"step": 3, "reward_mean": 0.5, "lag_mean": 1.25, "step_seconds": 0.4, "trainer/idle_ratio": 0.68}
    assert line_of({"sft_step": 20, "loss": 1.5}) == "supervised step 20: loss 1.50"
    assert line_of({"sft_step": 20, "sft_accuracy": 0.25}) == "supervised step 20: sampled accuracy 0.25"
    assert line_of({"step": 3, "eval_greedy": 0.5}) == ""
    lines, seldom = Headlines(line_of, every_s=0.0), Headlines(line_of, every_s=1e9)
    for rows in (lines, seldom):
        rows.record(**row)
        rows.record(published=3)
        rows.record(**row | {"step": 4})
    summary = "reward 0.50, lag 1.2, 0.4 s of which 68 % waiting"
    assert caplog.messages == [f"step 3: {summary}", f"step 4: {summary}", f"step 3: {summary}"]


async def test_rows_are_tensorboard_s_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    async with wire_training.trainer_rows(TrainerConfig(tensorboard=True), make_run(), tmp_path) as rows:
        rows.record(step=1, loss=2.0)
        rows.record(step=2, loss=1.0)
        rows.record(sft_step=5, loss=9.0)
        rows.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
    assert [(event.step, event.value) for event in events.Scalars("sft/loss")] == [(5, 9.0)]


def wandb_records(file: bytes) -> Iterator[bytes]:
    """Yield the records of W&B's file: LevelDB's log format after 7 bytes. Blocks of 32 KiB; checksum, length, kind, bytes."""
    place, whole = 7, b""
    while place < len(file):
        if 2**15 - place % 2**15 < 7:
            place += 2**15 - place % 2**15
            continue
        length, kind = struct.unpack_from("<HB", file, place + 4)
        whole += file[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # all of it, or its last piece
            yield whole
            whole = b""


def wandb_records_of(folder: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    return [Record.FromString(record) for record in wandb_records(path.read_bytes())]


def wandb_history(folder: Path) -> list[dict[str, float]]:
    # Another process writes the file, and then reports that it is complete.
    wait_until(lambda: any(record.HasField("exit") for record in wandb_records_of(folder)))
    return [
        {item.key or item.nested_key[0]: float(item.value_json) for item in record.history.item}
        for record in wandb_records_of(folder)
        if record.HasField("history")
    ]


@pytest.mark.slow
async def test_rows_are_weights_and_biases_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library, offline: its folder holds what `wandb sync` would send."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    async with wire_training.trainer_rows(TrainerConfig(wandb_project="demo"), make_run(), tmp_path) as rows:
        rows.record(sft_step=5, loss=9.0)
        rows.record(step=1, loss=2.0, encodings={"anchor": 3})
        rows.close()
    found = wandb_history(tmp_path)
    mine = [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]
    assert mine == [{"sft/sft_step": 5.0, "sft/loss": 9.0}, {"step": 1.0, "loss": 2.0}]


WITHOUT_LOGIN = """
import sys
from pathlib import Path
from prime_node.adapters.wandb_rows import WandbRows
from prime_protocol.errors import LocalError
try:
    WandbRows(Path(sys.argv[1]), project="demo", run_id="a", name="a")
except LocalError as error:
    print("error:", error)
"""


def test_weights_and_biases_without_a_login_is_reported_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    named = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    alone = named | {"HOME": str(tmp_path), "WANDB_BASE_URL": "http://127.0.0.1:1", "WANDB_SILENT": "true"}
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_LOGIN, tmp_path],
        capture_output=True,
        text=True,
        env=alone,
        stdin=subprocess.DEVNULL,
    )
    assert "error: Weights & Biases: No API key" in ran.stdout, ran.stderr
    assert "WANDB_MODE=offline" in ran.stdout


@pytest.mark.slow
async def test_the_coordinators_rows_are_a_run_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real daemon's rows of a real step."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = coordinator_world.make_run()
    rows = rows_in(tmp_path, run, tensorboard=False, wandb_project="demo", who="coordinator")
    parts = replace(coordinator_world.memory_parts(run), rows=BestEffort(rows))
    async with coordinator_world.running(parts) as world:
        await world.publish()
        await world.join(coordinator_world.ANNA)
        await world.fill(0)
        await world.publish()
    [row] = wandb_history(tmp_path)
    assert (row["step"], row["lag_max"], row["fully_async/count/current_param_version"]) == (0.0, 0.0, 1.0)
    [folder] = (tmp_path / "wandb").glob("offline-run-*")
    assert folder.name.endswith(f"{run.digest[:32]}-coordinator")


def test_utilisation_is_relative_to_the_peak_of_all_devices() -> None:
    metrics = {"num_tokens": 100.0, "num_computed_tokens": 300.0, "model_flops": 6e9, "ranks": 2.0}
    assert speed(metrics, 2.0, 1e10) == {
        "tokens_per_second": 50.0,
        "computed_tokens_per_second": 150.0,
        "mfu": pytest.approx(0.15),
    }
    assert speed({"num_tokens": 0.0}, 0.0, 1e10) == {"tokens_per_second": 0.0}
