"""A worker of an engine class that the run does not know becomes calibrated during the run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    ROOT,
    VALIDATOR,
    Bytes,
    Letters,
    World,
    make_run,
    memory_parts,
    running,
)
from tests.node.operator_world import operate, run_dir_of, write_key

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.broadcast.follow.trust import Trust
from prime_node.cli.run_dir import RunDir
from prime_node.cli.shipped import shipped_calibration
from prime_node.cli.wire_measurement import random_model
from prime_node.folder_lock import FolderLock
from prime_node.ports.documents import amendment_name
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.loop import run_validator as run_validator
from prime_node.validator.scoring_workers import ScoringWorkers
from prime_node.validator.validator import Validator
from prime_node.worker.generating import bundle_for, requests_for
from prime_protocol.assignment import Sampling
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.digest import digest_of
from prime_protocol.envelope import open_envelope, parse_json
from prime_protocol.errors import LocalError
from prime_protocol.key_ring import Role
from prime_protocol.requests import JoinRequest
from prime_protocol.rollout import rollouts_for
from prime_protocol.run_spec import PinnedRun, open_run_spec
from prime_protocol.verdict import BundleStatus, Receipt
from prime_protocol.verify import LIKELIHOOD_RATIOS
from prime_protocol.weights import Weights

FP32, BF16 = "transformers/fp32/cpu", "transformers/bf16/cpu"
SIZE = {"hidden_size": 16, "num_hidden_layers": 1}
MEASURED = shipped_calibration().without(LIKELIHOOD_RATIOS)


def fp32_run() -> PinnedRun:
    """A run whose calibration knows fp32 workers judged in fp32 only."""
    known = [pair for pair in MEASURED.pairs if (pair.worker, pair.validator) == (FP32, FP32)]
    checks = CheckPolicy(calibration=MEASURED.model_copy(update={"pairs": tuple(known)}))
    return make_run(
        vocab_size=264, checks=checks, sampling=Sampling(completion_tokens_max=8, stop_token_ids=()), max_steps=4
    )


class Engines:
    """A bf16 engine that samples, and an fp32 engine that judges."""

    def __init__(self, folder: Path) -> None:
        self.weights: Weights = initial_weights(folder, 5)
        self.sampler = TransformersEngine(folder, dtype="bf16", threads=1)
        self.judge = TransformersEngine(folder, threads=1)

    async def load(self) -> None:
        for engine in (self.sampler, self.judge):
            await engine.load(self.weights, policy_version=0)

    async def close(self) -> None:
        for engine in (self.sampler, self.judge):
            await engine.close()

    def validator(self, world: World, run: PinnedRun) -> Validator:
        async def policy(version: int) -> Weights:
            return self.weights

        return Validator(
            run=run,
            config=ValidatorConfig(),
            coordinator=world.client(VALIDATOR),
            scorer=self.judge,
            scoring_workers=ScoringWorkers(lambda: {"letters": Letters()}, workers_max=1),
            tokenizer=Bytes(),
            policy=policy,
            policy_versions=lambda: (),
            clock=world.parts.clock,
        )


@pytest.fixture
async def engines(tmp_path: Path) -> AsyncIterator[Engines]:
    (tmp_path / "model").mkdir()
    made = Engines(random_model(tmp_path / "model"))
    await made.load()
    yield made
    await made.close()


async def receipt_of_next_bundle(world: World, engines: Engines) -> Receipt:
    """Let Anna's bf16 engine fulfil a lease honestly; return the receipt of the judged bundle."""
    lease = await world.lease(ANNA, rollouts_max=2)
    completions = await engines.sampler.generate(requests_for(lease), lease.sampling)
    rollouts = rollouts_for(lease, completions)
    digest = digest_of(lease.model_dump_json().encode())
    parcel = bundle_for(lease, rollouts, key=ANNA, engine=engines.sampler.info, created_at_ms=0, lease_digest=digest)
    await world.client(ANNA).upload(parcel)

    async def found() -> bool:
        return any(one.lease_id == lease.lease_id for one in await receipts(world))

    await world.until(found, seconds=120.0)
    return next(one for one in await receipts(world) if one.lease_id == lease.lease_id)


def served_run_dir(world: World, folder: Path) -> RunDir:
    """Write the run folder of the world's coordinator, which holds its lock."""
    place = run_dir_of(world, folder)
    place.public.mkdir(parents=True)
    (place.public / "run.json").write_bytes(world.run.envelope.to_bytes())
    place.model.mkdir()
    (place.model / "config.json").write_text(json.dumps(SIZE))
    FolderLock(place.coordinator)
    return place


async def receipts(world: World) -> list[Receipt]:
    stored, _ = await world.parts.store.receipts_of(ANNA.key_id, after=0, limit=100, chars_max=2**30)
    opened = [parse_json(open_envelope(one.envelope.encode()).payload, Receipt) for one in stored]
    return [one for one in opened if one.status is not BundleStatus.PENDING]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_new_class_is_weighed_from_its_amendment_on_and_its_earlier_receipts_stay(
    tmp_path: Path, engines: Engines
) -> None:
    run = fp32_run()
    async with running(memory_parts(run)) as world:
        await world.publish()
        request = JoinRequest(name="anna", software="1", engine=engines.sampler.info, rollouts_max=64)
        assert f"no calibration for {BF16}" in (await world.client(ANNA).join(request)).notice
        pinned = open_run_spec(run.envelope, pinned=run.digest)
        trust = Trust(pinned, [("http", world.client(VALIDATOR))], tmp_path / "trust", clock=world.parts.clock)
        stop = asyncio.Event()
        judging = asyncio.create_task(run_validator(engines.validator(world, pinned), stop))
        before = await receipt_of_next_bundle(world, engines)
        assert before.evidence is None

        measured = tmp_path / "measured.json"
        measured.write_text(MEASURED.model_dump_json())
        place = served_run_dir(world, tmp_path)
        write_key(place.key(Role.ROOT), ROOT)
        shown = await operate("amend", place.path, measured)
        assert "calibration 1 is in force" in shown
        assert f"{BF16} judged by {FP32}" in " ".join(shown.split())

        assert (await world.client(ANNA).join(request)).notice == ""
        late = await receipt_of_next_bundle(world, engines)
        assert late.evidence is None, "a validator that has not seen the amendment judges by what it knows"
        await trust.refresh()
        after = await receipt_of_next_bundle(world, engines)
        assert after.status is BundleStatus.ACCEPTED
        assert after.evidence is not None
        assert (after.evidence.worker, after.evidence.validator, after.evidence.calibration) == (BF16, FP32, 1)
        assert set(after.evidence.sums) <= set(run.spec.checks.statistics)
        assert (await world.status())["workers"][0]["calibrated"] is True
        assert before in await receipts(world)
        stop.set()
        await judging


async def test_an_amendment_needs_the_root_and_a_calibration_of_the_runs_size(tmp_path: Path) -> None:
    run = fp32_run()
    async with running(memory_parts(run)) as world:
        place = served_run_dir(world, tmp_path)
        config = place.model / "config.json"
        measured = tmp_path / "measured.json"
        measured.write_text(MEASURED.model_dump_json())
        with pytest.raises(LocalError, match=r"0 of 1 root keys are here; add `--key FILE`"):
            await operate("amend", place.path, measured)
        root = write_key(tmp_path / "root.key", ROOT)
        config.write_text(json.dumps({"hidden_size": 4_096, "num_hidden_layers": 1}))
        with pytest.raises(LocalError, match="smaller model"):
            await operate("amend", place.path, measured, "--key", root)
        config.write_text(json.dumps(SIZE))
        await operate("amend", place.path, measured, "--key", root, "--note", "by hand")
        assert world.run.calibrations.amendments[0][0].note == "by hand"
        assert BF16 in world.run.checks.worker_classes
        stored = place.public / amendment_name(1)
        stored.parent.mkdir()
        stored.write_bytes(world.run.calibrations.amendments[0][1].to_bytes())
        with pytest.raises(LocalError, match="no pair of engine classes that the run lacks"):
            await operate("amend", place.path, measured, "--key", root)
