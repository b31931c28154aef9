"""Re-execution of published steps: exact for honest trainers of any recipe, and each fault has its outcome."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.node.batch_coordinator import Fuse, KilledError, write_model
from tests.node.replay_world import (
    STEPS,
    PublishedRun,
    one_group_less,
    one_more_reward,
    replayable_run,
    replayed,
    signing_again,
    trained,
    with_batches,
    with_state,
)
from tests.node.trainer_world import CONFIG, EchoEnvironment, make_trainer

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.cli.launch import launch
from prime_node.cli.man import EXIT_CODES as MANUAL_CODES
from prime_node.cli.replay import exit_with_report
from prime_node.replay.checks import BatchChecks, check_bounds
from prime_node.replay.finding import (
    EXIT_CODES,
    FAULT_CODES,
    ReplayOutcome,
    ReplayReport,
    StepFinding,
    Unfaithful,
    Withheld,
)
from prime_node.replay.material import Material
from prime_node.replay.tolerance import AdamBound
from prime_node.trainer.algorithm_config import AdamW, AdvantageConfig, CriticConfig, KlControlConfig, LossConfig
from prime_node.trainer.config import LoraConfig, TrainerConfig
from prime_node.trainer.loop import run_trainer
from prime_node.trainer.pinned_recipe import NOT_PINNED, config_of, recipe_document
from prime_node.training_data.feed import StepBatch
from prime_protocol.digest import digest_of
from prime_protocol.envelope import parse_json
from prime_protocol.errors import LocalError
from prime_protocol.replay import ReplayPolicy
from prime_protocol.replies import BatchGroup, TrainBatch
from prime_protocol.verdict import Receipt


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> PublishedRun:
    return asyncio.run(trained(tmp_path_factory.mktemp("whole"), replayable_run()))


async def test_each_step_of_an_honest_run_is_exact_from_the_seed_on(tmp_path: Path, whole: PublishedRun) -> None:
    report = await replayed(whole, tmp_path, genesis=True)
    assert [(one.step, one.outcome) for one in report.steps] == [(n, ReplayOutcome.EXACT) for n in range(-1, STEPS)], (
        report
    )
    assert EXIT_CODES[report.outcome] == 0
    states = [signed.manifest.produced_by.training_state is not None for signed in whole.manifests]
    assert states == [True, False, True, False, True]
    assert not list((tmp_path / "states").glob("*"))


async def test_a_single_step_begins_at_the_training_state_before_it(tmp_path: Path, whole: PublishedRun) -> None:
    report = await replayed(whole, tmp_path, [3])
    assert [one.step for one in report.steps] == [2, 3]
    assert report.outcome is ReplayOutcome.EXACT


@pytest.mark.parametrize(
    ("cheat", "first", "code"),
    [
        ({"packed_as": one_more_reward}, 0, 1),
        ({"packed_as": one_group_less}, 0, 1),
        ({"lr_factor": 1.001}, -1, 1),
        ({"flips_state": True}, 0, 12),
    ],
    ids=["changed reward", "dropped group", "learning rate + 0.1 %", "foreign state"],
)
async def test_what_a_trainer_does_otherwise_is_found_in_its_first_step(
    tmp_path: Path, cheat: dict[str, Any], first: int, code: int
) -> None:
    published = await trained(tmp_path / "cheat", replayable_run(max_steps=2), **cheat)
    report = await replayed(published, tmp_path, range(2), genesis=first < 0)
    assert next(one.step for one in report.steps if one.outcome is ReplayOutcome.DIFFERS) == first, report
    assert report.exit_code == code


async def test_each_fault_in_what_is_signed_has_its_own_exit_code(tmp_path: Path, whole: PublishedRun) -> None:
    batch = parse_json(whole.batches[0, 0].payload, TrainBatch)
    groups = batch.groups
    tokenizer = HfTokenizer(write_model(tmp_path / "model"))

    async def code_of(
        published: PublishedRun, *, environments: bool = False, receipts: dict[str, Receipt] | None = None
    ) -> tuple[str, int]:
        assert published.run.spec.replay is not None
        worlds = {"echo": EchoEnvironment()} if environments else None
        material = Material(published, published.run, published.run.spec.replay)
        checks = BatchChecks(material, worlds, tokenizer, receipts)

        async def check(trained_on: StepBatch, finding: StepFinding) -> None:
            checks.material.batches[0] = (parse_json(published.batches[0, 0].payload, TrainBatch),)
            await checks.check(trained_on, finding)

        report = ReplayReport(published.run.digest, pinned=True)
        try:
            report = await replayed(published, tmp_path, [0], check=check)
        except (Withheld, Unfaithful) as error:
            report.end(error, 0)
        found = report.as_fields()
        return found["fault"] or found["outcome"], found["exit_code"]

    def with_groups(*changed: BatchGroup) -> PublishedRun:
        return with_batches(whole, 0, [batch.model_copy(update={"groups": changed})])

    raised = groups[0].model_copy(update={"rewards": tuple(1.0 - one for one in groups[0].rewards)})
    made = whole.manifests[1].manifest.produced_by
    assert made.lr is not None

    def flip(fields: dict[str, Any], data: bytearray) -> None:
        data[-1] ^= 0x40

    gone = signing_again(whole, 1)
    gone.bundles = {}
    found = {
        "changed reward": await code_of(with_groups(raised, *groups[1:]), environments=True),
        "dropped group": await code_of(with_groups(*groups[1:])),
        "learning rate + 0.1 %": await code_of(signing_again(whole, 1, lr=made.lr * 1.001)),
        "foreign state": await code_of(with_state(whole, 0, flip)),
        "withheld bundle": await code_of(gone),
        "not in the ledger": await code_of(whole, receipts={}),
    }
    assert found == {
        "changed reward": ("reward", 9),
        "dropped group": ("batch", 10),
        "learning rate + 0.1 %": ("learning_rate", 11),
        "foreign state": ("state", 12),
        "withheld bundle": ("withheld", 8),
        "not in the ledger": ("ledger", 13),
    }
    elsewhere = {int(code) for code, _ in MANUAL_CODES if code.isdigit()}
    assert elsewhere & {*FAULT_CODES.values(), *EXIT_CODES.values()} == {0, 1, 3, 4}, "these mean the same"


async def test_a_process_that_dies_accuses_no_trainer() -> None:
    """Before, `--nproc` ended with torchrun's 1, as if weights did not follow."""
    dies = [sys.executable, "-c", "import os; os._exit(1)"]
    assert await launch(dies, [], asyncio.Event(), unfinished=130, failed=3) == 3
    assert await launch(dies, [], asyncio.Event(), unfinished=130) == 1


async def test_options_of_the_launcher_come_before_two_dashes() -> None:
    """Before, `replay --nproc 2 -- TARGET` took them for further targets: a usage error."""
    program = """
import argparse, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("--stop-with-parent", action="store_true", required=True)
parser.add_argument("--outcome-file", type=pathlib.Path, required=True)
parser.add_argument("target")
given = parser.parse_args()
given.outcome_file.write_text("7" if given.target == "--target" else "8")
"""
    command = [sys.executable, "-c", program]
    assert await launch(command, ["--", "--target"], asyncio.Event(), unfinished=130) == 7


async def test_a_withheld_bundle_is_a_finding_of_its_own(tmp_path: Path, whole: PublishedRun) -> None:
    gone = dict(whole.bundles)
    kept = whole.bundles.copy()
    try:
        whole.bundles.clear()
        with pytest.raises(Withheld, match="bundle"):
            await replayed(whole, tmp_path, [0])
        whole.bundles.update({digest: data[:-1] + b"?" for digest, data in gone.items()})
        with pytest.raises(Withheld, match="other bytes"):
            await replayed(whole, tmp_path, [0])
    finally:
        whole.bundles = kept
    assert EXIT_CODES[ReplayOutcome.WITHHELD] == 8


async def test_other_arithmetic_cannot_say_unless_the_tolerance_is_asked_for(
    tmp_path: Path, whole: PublishedRun
) -> None:
    report = await replayed(whole, tmp_path, [0, 1], row_tokens=64)
    if report.outcome is not ReplayOutcome.EXACT:  # the packing of so short sequences may give the same bits
        assert report.outcome is ReplayOutcome.OTHER_NUMERICS
        assert report.numerics["here"].endswith("tree64")
    tolerated = await replayed(whole, tmp_path, [0], row_tokens=64, tolerance=True)
    assert tolerated.outcome in (ReplayOutcome.EXACT, ReplayOutcome.TOLERATED), tolerated


CUSTOM = """
from prime_node.algo.losses import LossInputs, LossOutputs


def half(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(-0.5 * (inputs.trainer_logprobs * inputs.advantages)[inputs.loss_mask].sum(), {})
"""
RECIPES: dict[str, dict[str, Any]] = {
    "dapo with a reference that is renewed": {
        "loss": LossConfig(type="dapo", kl_loss_coef=0.5, entropy_coeff=0.01),
        "ref_update_interval": 2,
    },
    "a critic": {"advantage": AdvantageConfig(type="gae"), "critic": CriticConfig(optimizer=AdamW(lr=1e-3))},
    "an adaptive divergence in the reward": {
        "use_kl_in_reward": True,
        "kl_ctrl": KlControlConfig(type="adaptive", kl_coef=0.1, horizon=10.0),
        "ref_update_interval": 1,
    },
    "tokens chosen by their covariance": {"loss": LossConfig(type="clip_cov")},
    "adapters that are merged": {"lora": LoraConfig(rank=4, alpha=8)},
    "own code": {"loss": LossConfig(import_path="own_losses:half")},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
async def test_recipes_with_further_state_are_exact_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "own_losses.py").write_text(CUSTOM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_losses", raising=False)
    config = CONFIG.model_copy(update=RECIPES[name])
    published = replayable_run(config)
    with pytest.raises(KilledError):
        await trained(tmp_path / "run", published, config, fuse=Fuse("after publish", 4))
    await trained(tmp_path / "run", published, config)
    report = await replayed(published, tmp_path)
    assert [one.outcome for one in report.steps] == [ReplayOutcome.EXACT] * STEPS, report


async def test_a_training_state_that_does_not_fit_on_the_disk_is_not_fetched(
    tmp_path: Path, whole: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert whole.run.spec.replay is not None
    material, usage = Material(whole, whole.run, whole.run.spec.replay), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type(usage)(usage.total, usage.used, 2**10))
    with pytest.raises(LocalError, match="are free in"):
        await material.fetch_state(0, tmp_path / "state")
    assert not (tmp_path / "state").exists()


async def test_rates_and_movements_are_bounded_without_torch(whole: PublishedRun) -> None:
    assert whole.run.spec.replay is not None
    report = ReplayReport(whole.run.digest, pinned=True)
    material = Material(whole, whole.run, whole.run.spec.replay)
    await check_bounds(material, CONFIG, range(STEPS), report, lambda finding: None)
    assert [one.outcome for one in report.steps] == [ReplayOutcome.EXACT] * STEPS
    slower = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"lr": 0.999e-3})})
    await check_bounds(material, slower, [0], report, lambda finding: None)
    assert report.outcome is ReplayOutcome.DIFFERS
    assert AdamBound(0.9, 0.95, 0.0).per_lr(1_000) == pytest.approx(1.16496, abs=1e-5)
    assert AdamBound(0.9, 0.999, 0.0).per_lr(100_000) == pytest.approx(7.27, abs=0.01)


@pytest.mark.parametrize("count", [2, -1])
async def test_a_number_of_optimizer_steps_that_the_schedule_does_not_have_is_a_fault(
    whole: PublishedRun, count: int
) -> None:
    """Before, any number widened the bound, and sized a table here."""
    assert whole.run.spec.replay is not None
    before = whole.manifests[0].manifest.produced_by.optimizer_steps
    stated = signing_again(whole, 1, optimizer_steps=before + count)
    report = ReplayReport(whole.run.digest, pinned=True)
    material = Material(stated, stated.run, whole.run.spec.replay)
    await check_bounds(material, CONFIG, [0], report, lambda finding: None)
    assert report.steps[0].detail == f"step 0 takes {count} optimizer steps, and at most 1 are due"


def test_the_recipe_pins_what_weights_depend_on_and_refuses_what_cannot_be_repeated() -> None:
    assert TrainerConfig.model_fields.keys() >= NOT_PINNED
    document = recipe_document(CONFIG)
    policy = ReplayPolicy(recipe=digest_of(document))
    assert recipe_document(config_of(document, policy)) == document
    assert recipe_document(CONFIG.model_copy(update={"threads": 2, "device": "cuda"})) == document
    endless = CONFIG.model_copy(update={"claim_nats_max": float("inf")})
    assert json.loads(recipe_document(endless))["trainer"]["claim_nats_max"] == "inf"
    compact = CONFIG.model_copy(update={"optimizer": AdamW(moments="8bit")})
    with pytest.raises(LocalError, match="8bit"):
        recipe_document(compact)
    with pytest.raises(LocalError, match="mode opd"):
        recipe_document(CONFIG.model_copy(update={"mode": "opd"}))
    with pytest.raises(LocalError, match="not the one that the RunSpec pins"):
        config_of(recipe_document(endless), policy)


async def test_a_trainer_with_other_settings_is_refused_with_the_difference(
    tmp_path: Path, whole: PublishedRun
) -> None:
    other = CONFIG.model_copy(update={"optimizer": CONFIG.optimizer.model_copy(update={"lr": 1.001e-3})})
    with pytest.raises(LocalError, match=r"trainer.optimizer.lr is 0.001001 here, 0.001 in the recipe"):
        await run_trainer(make_trainer(tmp_path, whole, config=other), asyncio.Event())


def test_a_bug_in_the_program_accuses_no_trainer() -> None:
    with pytest.raises(typer.Exit) as ended:
        exit_with_report("nowhere", None, None, as_json=True)  # type: ignore[arg-type]
    assert ended.value.exit_code == 3
