"""Re-execution of runs of adapters, of a policy that teaches itself, and of a run that keeps so many bytes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.node.batch_coordinator import write_model
from tests.node.replay_world import STEPS, changed, mirrored, replayable_run, replayed, trained
from typer.testing import CliRunner

from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.broadcast.audit.safetensors_file import read_weights, write_safetensors
from prime_node.cli.main import app
from prime_node.cli.replay_target import ReplayOptions, replay_target
from prime_node.envs.settings import EnvironmentSettings
from prime_node.replay.finding import FINDING, ReplayOutcome
from prime_protocol.adapters import AdapterSpec, unit_for
from prime_protocol.errors import LocalError
from prime_protocol.limits import REPLAY_DAYS_MAX
from prime_protocol.training_state import TrainingState
from prime_protocol.weights import root_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SELF_TAUGHT = changed(mode="opsd", self_distillation={"policy": "reference"}, filters=())


async def test_a_run_of_adapters_is_exact(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    write_safetensors(base / "model.safetensors", initial_weights(base, seed=4))
    spec = AdapterSpec(base="base", base_root=root_of(read_weights(base)), rank=4, alpha=8, unit_log2=unit_for(4, 8))
    config = changed(initial_weights=str(base), sft={"steps_max": 0}, evaluate_every=0)
    published = await trained(tmp_path, replayable_run(config, adapters=spec), config)
    assert len(set(published.roots)) > 1
    report = await replayed(published, tmp_path, genesis=True)
    assert [one.outcome for one in report.steps] == [ReplayOutcome.EXACT] * (STEPS + 1), report


async def test_a_policy_that_teaches_itself_is_exact_and_needs_the_environments_answers(tmp_path: Path) -> None:
    """Before, --no-rewards left the environments out, so that an honest trainer's weights did not follow."""
    published = await trained(tmp_path, replayable_run(SELF_TAUGHT), SELF_TAUGHT)
    assert len(set(published.roots)) == STEPS + 1
    report = await replayed(published, tmp_path)
    assert [one.outcome for one in report.steps] == [ReplayOutcome.EXACT] * STEPS, report

    mirror = await mirrored(published, tmp_path / "mirror", SELF_TAUGHT)
    with pytest.raises(LocalError, match=r"^[^-]*echo[^-]*$"):
        await replay_target(str(mirror), ReplayOptions(steps=(0,), rewards=False), EnvironmentSettings())


async def test_steps_that_the_promised_bytes_do_not_hold_are_not_in_the_draw(tmp_path: Path) -> None:
    """States have the same size once there are moments, and the promise holds two: step 3 is the first that must be there."""
    probe = await trained(tmp_path / "probe", replayable_run(max_steps=2))
    index = TrainingState.model_validate_json(probe.blobs[str(probe.manifests[2].manifest.produced_by.training_state)])
    size = sum(part.size for part in index.parts)
    promise = {"bytes_max": round(2.5 * size), "state_days": REPLAY_DAYS_MAX, "bundle_days": REPLAY_DAYS_MAX}
    published = await trained(tmp_path / "run", replayable_run(promise=promise))  # dated 1970
    mirror = await mirrored(published, tmp_path / "mirror")
    drawn = await replay_target(str(mirror), ReplayOptions(sample=9, bound_only=True), EnvironmentSettings())
    assert [one.step for one in drawn.steps] == [3]
    assert any("steps 0 to 2 were not in the draw" in note and "GiB" in note for note in drawn.notes)

    first = str(published.manifests[0].manifest.produced_by.training_state)
    (mirror / "blobs" / first[:2] / first).unlink()
    gone = await replay_target(str(mirror), ReplayOptions(steps=(0,), rewards=False), EnvironmentSettings())
    assert gone.outcome is ReplayOutcome.WITHHELD
    assert "the RunSpec promises states and bundles of 36500 days, or the newest" in gone.notes[-1]


async def test_a_third_party_gives_evidence_the_settings_of_environments_or_leaves_their_rewards_out(
    tmp_path: Path,
) -> None:
    """Before, evidence of a run on a data set could not be verified: there was nowhere to name its folder."""
    published = await trained(tmp_path, replayable_run(max_steps=1))
    mirror, folder = await mirrored(published, tmp_path / "mirror"), tmp_path / "evidence"
    options = ReplayOptions(steps=(0,), rewards=False, evidence=folder)
    assert (await replay_target(str(mirror), options, EnvironmentSettings())).exit_code == 0
    finding = json.loads((folder / FINDING).read_text())
    finding["options"]["rewards"] = True
    (folder / FINDING).write_text(json.dumps(finding))
    command = ["evidence", "verify", str(folder), "--run", published.run.digest]
    refused = await asyncio.to_thread(CliRunner().invoke, app, command)
    assert "echo" in str(refused.exception)
    for more in (["--no-rewards"], ["--no-rewards", "--set", "environments.data_folder=/data"]):
        shown = await asyncio.to_thread(CliRunner().invoke, app, [*command, *more])
        assert (shown.exit_code, "1 steps: exact" in shown.stdout) == (0, True), shown.output
