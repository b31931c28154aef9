"""Training states of strangers: none of another recipe is taken, and no tolerance covers a forged part."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from tests.node.replay_world import PublishedRun, replayable_run, replayed, trained, with_state
from tests.node.trainer_world import CONFIG

from prime_node import __version__
from prime_node.cli.evidence import repeat_finding
from prime_node.replay.checks import check_bounds
from prime_node.replay.finding import RecordedSource, ReplayOutcome, ReplayReport, Unfaithful
from prime_node.replay.material import Material

MADE_HERE = {"software": f"prime-node {__version__}"}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> PublishedRun:
    return asyncio.run(trained(tmp_path_factory.mktemp("two"), replayable_run(max_steps=2)))


def scaled(part: str, factor: float) -> Callable[[dict[str, Any], bytearray], None]:
    """Return a change of all tensors whose names end so."""

    def change(fields: dict[str, Any], data: bytearray) -> None:
        place = 0
        for tensor in fields["tensors"]:
            size = 4 * int(np.prod(tensor["shape"]))
            assert tensor["dtype"] == "fp32"
            if tensor["name"].endswith(part):
                values = np.frombuffer(data, np.float32, count=size // 4, offset=place)
                values *= factor
            place += size

    return change


async def outcome_on_other_arithmetic(published: PublishedRun, folder: Path) -> tuple[ReplayOutcome, str]:
    report = await replayed(published, folder, [0, 1], row_tokens=64, tolerance=True)
    return report.outcome, " ".join(one.detail for one in report.steps)


@pytest.mark.parametrize("part", [".exp_avg", ".exp_avg_sq", ".step"])
async def test_a_forged_part_of_an_optimizer_hides_in_no_tolerance(
    tmp_path: Path, two_steps: PublishedRun, part: str
) -> None:
    """Before, only the policy's masters were compared, so moments of any size passed."""
    forged = with_state(two_steps, 2, scaled(part, 2.0))
    outcome, detail = await outcome_on_other_arithmetic(forged, tmp_path)
    assert outcome is ReplayOutcome.OTHER_NUMERICS
    assert "other parts of the training state are further apart" in detail


async def test_a_tolerance_covers_weights_that_moved_a_little_and_no_counter(
    tmp_path: Path, two_steps: PublishedRun
) -> None:
    """Before, a learning rate that does not follow was overwritten with "within tolerance"."""
    near = with_state(two_steps, 2, scaled(".exp_avg", 1.0 + 1e-6))
    assert (await outcome_on_other_arithmetic(near, tmp_path))[0] is ReplayOutcome.TOLERATED
    lr = two_steps.manifests[2].manifest.produced_by.lr
    assert lr is not None
    stated = with_state(two_steps, 2, scaled(".exp_avg", 1.0 + 1e-6), lr=1.01 * lr)
    outcome, detail = await outcome_on_other_arithmetic(stated, tmp_path)
    assert outcome is ReplayOutcome.OTHER_NUMERICS
    assert "lr, multiplier" in detail


async def test_a_tolerance_that_could_hide_the_update_says_nothing(
    tmp_path: Path, two_steps: PublishedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_node.replay.reexecution.REST_MAX", 2e-3)
    outcome, detail = await outcome_on_other_arithmetic(with_state(two_steps, 2, scaled(".exp_avg", 2.0)), tmp_path)
    assert outcome is ReplayOutcome.OTHER_NUMERICS
    assert "which shows nothing" in detail


def one_more(name: str) -> Callable[[dict[str, Any], bytearray], None]:
    def change(fields: dict[str, Any], data: bytearray) -> None:
        fields["tensors"].append({"name": name, "dtype": "fp32", "shape": [2**20]})
        data.extend(bytes(2**22))

    return change


def without_one(fields: dict[str, Any], data: bytearray) -> None:
    last = fields["tensors"].pop()
    del data[-4 * int(np.prod(last["shape"])) :]


@pytest.mark.parametrize(
    "change",
    [one_more("model.more"), one_more("reference.lm_head.weight"), one_more("optimizer.more.exp_avg"), without_one],
    ids=["another master", "a larger reference", "moments of nothing", "a master less"],
)
async def test_a_state_of_another_model_is_a_fault_before_its_parts_are_fetched(
    tmp_path: Path, two_steps: PublishedRun, change: Callable[[dict[str, Any], bytearray], None]
) -> None:
    """Before, all of it was fetched, and "this machine is at fault" followed."""
    foreign = with_state(two_steps, 0, change)
    parts = json.loads(foreign.blobs[foreign.manifests[0].manifest.produced_by.training_state or ""])["parts"]
    foreign.blobs = {digest: data for digest, data in foreign.blobs.items() if digest != parts[0]["digest"]}
    with pytest.raises(Unfaithful, match="training state 0 is not one of the recipe"):
        await replayed(foreign, tmp_path, [0])


async def test_counters_that_no_trainer_of_the_recipe_writes_are_a_fault(
    tmp_path: Path, two_steps: PublishedRun
) -> None:
    """Before, `--genesis` ran any number of supervised steps that a state states."""

    def endless(fields: dict[str, Any], data: bytearray) -> None:
        fields["progress"] = json.dumps(json.loads(fields["progress"]) | {"sft_step": 10**9})

    def unreadable(fields: dict[str, Any], data: bytearray) -> None:
        fields["progress"] = "{}"

    with pytest.raises(Unfaithful, match="supervised steps"):
        await replayed(with_state(two_steps, 0, endless), tmp_path, [], genesis=True)
    with pytest.raises(Unfaithful, match="not one of this release"):
        await replayed(with_state(two_steps, 0, unreadable, **MADE_HERE), tmp_path, [0])


def test_evidence_is_verified_as_it_was_found_and_runs_no_code_that_it_names(
    tmp_path: Path, two_steps: PublishedRun, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before, what `--bound-only` found was verified by a whole re-execution, for which the evidence has no bundles."""
    policy, run = two_steps.run.spec.replay, two_steps.run
    assert policy is not None
    report = ReplayReport(run.digest, pinned=True, options={"bound_only": True, "code": True})

    async def record() -> None:
        source = RecordedSource(two_steps, tmp_path)
        material = Material(source, run, policy)
        await source.run_spec()
        await material.head()
        await material.recipe()
        await check_bounds(material, CONFIG, [0, 1], report, lambda finding: None)
        source.finish(report.as_fields())

    asyncio.run(record())
    with pytest.raises(typer.Exit) as ended:
        repeat_finding(tmp_path, run.digest, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert (ended.value.exit_code, said["outcome"], said["options"]["bound_only"]) == (0, "exact", True)
    assert [one["established"] for one in said["steps"]] == [one.established for one in report.steps]
