"""`prime-node replay` of a stranger's run: its numbers size no memory on the machine of who re-executes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builder import build_manifest
from tests.node.batch_coordinator import TRAINER, make_run
from tests.node.coordinator_world import make_policy
from tests.node.operator_world import make_run_folder
from tests.node.replay_world import PublishedRun, mirrored, replayable_run, trained, with_state
from typer.testing import CliRunner

from prime_node.adapters.models.lora import LoraSettings, add_adapters
from prime_node.adapters.storage.folder_blobs import BLOBS
from prime_node.cli.main import app
from prime_node.cli.replay_target import ReplayOptions, replay_target
from prime_node.cli.run_dir import RunDir
from prime_node.envs.settings import EnvironmentSettings
from prime_node.replay import material
from prime_node.replay.finding import ReplayOutcome
from prime_node.replay.material import Material
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.pinned_recipe import config_of, recipe_document
from prime_protocol.checkpoint import encode_checkpoint
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.errors import LocalError
from prime_protocol.limits import REPLAY_DAYS_MAX, STEP_MAX
from prime_protocol.manifest import SignedManifest, open_manifest
from prime_protocol.replay import ReplayPolicy
from prime_protocol.run_spec import PinnedRun
from prime_protocol.training_state import TrainingState


def hostile_run(recipe: bytes) -> PinnedRun:
    """A run as long as a RunSpec may be, which commits to one training state."""
    return make_run(max_steps=STEP_MAX, replay=ReplayPolicy(recipe=digest_of(recipe), state_every=STEP_MAX))


def policy(run: PinnedRun, version: int, previous: str | None = None) -> SignedManifest:
    """A policy of any number by the run's own trainer."""
    made = {"step": version - 1, "lr": 0.1 if version else None, "lr_multiplier": 1.0, "numerics": "none"}
    made |= {"batch": "b" * 64 if version else None, "training_state": None if version % STEP_MAX else "c" * 64}
    weights = make_policy(0)
    first = build_manifest(run, None, weights, encode_checkpoint(weights))
    produced_by = first.produced_by.model_copy(update=made)
    changes = {"policy_version": version, "previous": previous, "produced_by": produced_by}
    return open_manifest(seal(first.model_copy(update=changes), PayloadType.MANIFEST, TRAINER), run)


def publish(folder: Path, recipe: bytes, run: PinnedRun, head: SignedManifest) -> None:
    """Write the run's published folder: its recipe and its newest policy."""
    (blob := folder / BLOBS / digest_of(recipe)[:2] / digest_of(recipe)).parent.mkdir(parents=True)
    blob.write_bytes(recipe)
    (folder / "run.json").write_bytes(run.envelope.to_bytes())
    (folder / "head.json").write_bytes(head.envelope.to_bytes())


@pytest.mark.parametrize("options", [ReplayOptions(bound_only=True), ReplayOptions(sample=1, bound_only=True)])
async def test_a_policy_of_any_number_takes_no_memory(tmp_path: Path, options: ReplayOptions) -> None:
    """Before, a head of policy 2,147,483,647 made a list of as many steps: 86 GB."""
    recipe = recipe_document(TrainerConfig())
    run = hostile_run(recipe)
    publish(tmp_path, recipe, run, policy(run, STEP_MAX, "a" * 64))
    report = await replay_target(str(tmp_path), options, EnvironmentSettings())
    assert report.outcome is ReplayOutcome.WITHHELD
    assert len(report.steps) == 1


async def test_a_chain_without_training_states_is_not_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the search for the state before a step kept each manifest of the way, of which a run may have any number."""
    run = hostile_run(b"")
    chain = [policy(run, 0)]
    for version in range(1, 12):
        chain.append(policy(run, version, chain[-1].digest))
    asked: list[int] = []

    class Watched(PublishedRun):
        async def manifest(self, policy_version: int) -> Envelope:
            asked.append(policy_version)
            return chain[policy_version].envelope

    monkeypatch.setattr(material, "KEPT_BYTES_MAX", 3 * len(chain[0].envelope.payload))
    assert run.spec.replay is not None
    work = Material(Watched(run), run, run.spec.replay)
    assert await work.state_before(11) == 0
    assert asked == list(reversed(range(12)))
    await work.signed(1)
    await work.signed(11)
    assert asked[12:] == [11], "the last ones are kept, and the first one is requested again"


def test_a_recipe_s_adapters_are_no_wider_than_the_model() -> None:
    """Before, a rank of a million took all memory: only the model's own parameters were counted."""
    layers = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 8))
    with pytest.raises(LocalError, match="rank is 5, above 4"):
        add_adapters(layers, LoraSettings(rank=5, alpha=1))


@pytest.mark.parametrize("trainer", [{"seed": 2**70}, {"sft": {"batch_size": 2**32}}])
def test_a_recipe_s_numbers_are_those_that_a_trainer_can_have(trainer: dict[str, Any]) -> None:
    """Before, `replay` ended with a traceback; and with --genesis a step of so many problems took 64 GB."""
    document = json.dumps({"code": {}, "trainer": trainer}).encode()
    with pytest.raises(LocalError, match="cannot read the recipe"):
        config_of(document, ReplayPolicy(recipe=digest_of(document)))


OF_THE_LIBRARY = {"_cli_parse_args": ["--help"], "_env_file": "others.env", "_secrets_dir": "."}
"""Arguments of the settings' library. By the first one it prints help and ends the process with exit code 0."""


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_a_recipe_gives_the_library_of_settings_no_arguments(tmp_path: Path, name: str) -> None:
    """Before, `replay` of such a run ended with exit code 0, which means exact; and a recipe could name files to read."""
    recipe = json.dumps({"code": {}, "trainer": {name: OF_THE_LIBRARY[name]}}).encode()
    run = hostile_run(recipe)
    publish(tmp_path, recipe, run, policy(run, 1, "a" * 64))
    shown = CliRunner().invoke(app, ["replay", str(tmp_path), "--bound-only", "--step", "0"])
    assert isinstance(shown.exception, LocalError), shown.output
    assert f"[trainer] {name!r}: no such setting" in str(shown.exception)


@pytest.mark.parametrize("name", OF_THE_LIBRARY)
def test_the_settings_of_a_folder_give_it_none(tmp_path: Path, name: str) -> None:
    """Before, `status FOLDER` and `ledger verify FOLDER` ended with exit code 0 too."""
    run = RunDir(make_run_folder(tmp_path / "run"))
    run.config.write_text(f"[coordinator]\n{name} = {json.dumps(OF_THE_LIBRARY[name])}\n")
    shown = CliRunner().invoke(app, ["status", str(run.path)])
    assert isinstance(shown.exception, LocalError), shown.output
    assert f"[coordinator] {name!r}: no such setting" in str(shown.exception)


@pytest.mark.slow
async def test_a_large_newest_state_takes_no_step_out_of_the_draw(tmp_path: Path) -> None:
    """Before, the size of the newest state alone decided how many steps the bound on bytes leaves: here step 3."""
    probe = await trained(tmp_path / "probe", replayable_run(max_steps=2))
    index = TrainingState.model_validate_json(probe.blobs[str(probe.manifests[2].manifest.produced_by.training_state)])
    size = sum(part.size for part in index.parts)
    promise = {"bytes_max": 10 * size, "state_days": REPLAY_DAYS_MAX, "bundle_days": REPLAY_DAYS_MAX}
    honest = await trained(tmp_path / "run", replayable_run(promise=promise))  # dated 1970

    def inflate(fields: dict[str, Any], data: bytearray) -> None:
        fields["tensors"].append({"name": "ballast", "dtype": "fp32", "shape": [3 * size // 4]})
        data += bytes(3 * size)

    for name, published in {"honest": honest, "large": with_state(honest, 4, inflate)}.items():
        mirror = await mirrored(published, tmp_path / name)
        options = ReplayOptions(sample=9, bound_only=True)
        drawn = await replay_target(str(mirror), options, EnvironmentSettings())
        assert [one.step for one in drawn.steps] == [0, 1, 2, 3], name
        noted = any(f"training state 4 has {4 * size:,} bytes" in note for note in drawn.notes)
        assert noted is (name == "large")
