"""`prime-node calibrate --run` measures a class that a run lacks, and `operate amend` stores it for the coordinator."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.worker_world import MemorySource
from typer.testing import CliRunner

from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.cli.main import app
from prime_node.cli.new import make_run
from prime_node.cli.options import Options
from prime_node.cli.run_dir import RunDir
from prime_node.cli.shipped import config_path, read_calibration, shipped_calibration
from prime_node.keyfile import load_key
from prime_protocol.checkpoint import root_of_table, tensor_table
from prime_protocol.envelope import open_envelope
from prime_protocol.errors import LocalError
from prime_protocol.key_ring import Role

FP32, BF16 = "transformers/fp32/cpu", "transformers/bf16/cpu"
DEMO = config_path("demo.toml")
LIGHT = '{name = "sums", id = "jsonl", options = {path = "sums.jsonl"}}'


def run_in(folder: Path) -> RunDir:
    """Make a run whose calibration knows fp32 only, and publish one policy of it."""
    data = folder / "data" / "sums.jsonl"
    data.parent.mkdir()
    data.write_text("".join(f'{{"question": "2 + {n}?", "answer": "{2 + n}"}}\n' for n in range(20)))
    known = [pair for pair in shipped_calibration().pairs if (pair.worker, pair.validator) == (FP32, FP32)]
    file = folder / "fp32.json"
    file.write_text(shipped_calibration().model_copy(update={"pairs": tuple(known)}).model_dump_json())
    settings = [f"run.environments=[{LIGHT}]", f"environments.data_folder={data.parent}", f"run.calibration={file}"]
    run_dir = RunDir(folder / "run")
    config = folder / "config.toml"
    config.write_text(DEMO.read_text().replace("[run.replay]\n", ""))  # else policies commit to their training
    run = make_run(run_dir, Options(config, settings), config_file=config).spec
    source = MemorySource(run_dir.load_run())
    source.blobs |= {file.digest: (run_dir.model / file.name).read_bytes() for file in run.model_files}
    source.publish(
        initial_weights(run_dir.model, 5),
        key=load_key(run_dir.key(Role.TRAINER)),
        model_config_digest=run.model_config_digest,
    )
    source.save(run_dir.public)
    return run_dir


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_class_is_measured_with_the_newest_policy_and_added_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = run_in(tmp_path)
    output = tmp_path / "bf16.json"
    words = ["calibrate", str(output), "--run", str(run_dir.path), "--sampler", "transformers/bf16"]
    result = CliRunner().invoke(app, [*words, "--tokens", "2000", "--no-cheats"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert [(pair.worker, pair.validator) for pair in read_calibration(output).pairs] == [(BF16, FP32)]
    policy = root_of_table(tensor_table(initial_weights(run_dir.model, 5)))
    assert any(policy in file.read_text() for file in (tmp_path / "cache").rglob("key.json"))

    amend = ["operate", "amend", str(run_dir.path), str(output)]
    result = CliRunner().invoke(app, amend, catch_exceptions=False)
    assert "calibration 1 is stored, and in force as soon as the coordinator starts" in " ".join(result.stdout.split())
    run = run_dir.load_run()
    run.calibrations.add(open_envelope((run_dir.public / "calibrations" / "0001.json").read_bytes()))
    assert run.checks.worker_classes == {FP32, BF16}
    assert run.checks.statistics == run.spec.checks.statistics
    with pytest.raises(LocalError, match="no pair of engine classes that the run lacks"):
        CliRunner().invoke(app, amend, catch_exceptions=False)
