"""The coordinator serves and obeys amendments of its run's calibration: over HTTP, and after a restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    COORDINATOR,
    ROOT,
    VALIDATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    refused,
    running,
)
from tests.node.dossiers_world import case_in, check
from tests.node.worker_world import next_ring

from prime_node.coordinator.daemon import serve_coordinator
from prime_node.ports.documents import amendment_name
from prime_protocol.amendment import CalibrationAmendment
from prime_protocol.assignment import Sampling
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, seal
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.evidence import BundleEvidence, Moments, Sums
from prime_protocol.identity import SigningKey
from prime_protocol.run_spec import PinnedRun
from prime_protocol.timestamp import open_timestamp

OLD, NEW = "test/fp32/cpu", "test/bf16/cpu"
NEW_ROOT = SigningKey(b"\x51" * 32)


def pair(worker: str) -> PairMoments:
    moments = Moments(cap=1.0, lambdas=(1.0,), log_moments=(0.1,), num_tokens=1_000)
    return PairMoments(worker=worker, validator=OLD, moments={"logprob": moments})


def calibrated_run() -> PinnedRun:
    sampling = Sampling(completion_tokens_max=32, stop_token_ids=(0,))
    return make_run(sampling=sampling, checks=CheckPolicy(calibration=Calibration(pairs=(pair(OLD),))))


def amendment(run: PinnedRun, worker: str = NEW, key: SigningKey = ROOT) -> Envelope:
    known = run.calibrations
    made = CalibrationAmendment(
        run=run.digest, version=known.version + 1, previous=known.digest, pairs=(pair(worker),), created_at_ms=0
    )
    return seal(made, PayloadType.CALIBRATION, key)


async def named(world: World) -> int:
    return open_timestamp(await world.client(ANNA).timestamp(), world.run).calibration


async def test_an_amendment_is_served_named_and_kept_over_a_restart(tmp_path: Path) -> None:
    run = calibrated_run()
    async with running(await folder_parts(run, tmp_path)) as world:
        assert await named(world) == 0
        first = amendment(run)
        for _ in range(2):
            assert (await world.post("/v1/calibrations", first.to_bytes()))[0] == 204
        assert (await world.client(ANNA).calibration(1)).payload == first.payload
        assert await named(world) == 1
        for beyond in ("0", "2", "x"):
            status, body, _ = await world.get(f"/v1/calibrations/{beyond}")
            assert (status, json.loads(body)["code"]) == (404, "not_found")
        assert json.loads((await world.get("/v1/status"))[1])["calibration"] == 1
    again = calibrated_run()
    async with running(await folder_parts(again, tmp_path)) as world:
        assert again.checks.worker_classes == {OLD, NEW}
        await world.client(ANNA).add_amendment(amendment(again, "test/fp8/cpu"))
        assert await named(world) == 2
    for known in (again, calibrated_run()):
        async with running(await folder_parts(known, tmp_path)) as world:
            assert (await named(world), len(known.checks.worker_classes)) == (2, 3)


async def test_an_amendment_that_was_stored_before_a_crash_is_in_force_after_it(tmp_path: Path) -> None:
    run = calibrated_run()
    parts = await folder_parts(run, tmp_path)
    await parts.published.write(amendment_name(1), amendment(run).to_bytes())
    async with running(parts) as world:
        assert world.run.calibrations.version == await named(world) == 1
    async with running(await folder_parts(calibrated_run(), tmp_path)) as world:
        assert await named(world) == 1


async def test_a_coordinator_without_a_recorded_amendment_does_not_start(tmp_path: Path) -> None:
    run = calibrated_run()
    async with running(await folder_parts(run, tmp_path)) as world:
        await world.client(ANNA).add_amendment(amendment(run))
    parts = await folder_parts(calibrated_run(), tmp_path)
    await parts.published.write(amendment_name(1), amendment(calibrated_run(), "test/fp8/cpu").to_bytes())
    with pytest.raises(LocalError, match="not the recorded one"):
        await serve_coordinator(parts, asyncio.Event())


async def test_only_the_present_root_adds_a_pair_and_only_to_a_calibrated_run() -> None:
    run = calibrated_run()
    async with running(memory_parts(run)) as world:
        path = "/v1/calibrations"
        await refused(world, ErrorCode.BAD_SIGNATURE, path, amendment(run, key=COORDINATOR).to_bytes())
        await refused(world, ErrorCode.MALFORMED, path, b"{")
        await refused(world, ErrorCode.MALFORMED, path, amendment(run, OLD).to_bytes())
        ring = next_ring(run.keys, ROOT, NEW_ROOT, published=None, root=(NEW_ROOT,))
        await world.client(ANNA).add_key_ring(ring)
        await refused(world, ErrorCode.REVOKED, path, amendment(run).to_bytes())
        await world.client(ANNA).add_amendment(open_envelope(amendment(run, key=NEW_ROOT).to_bytes()))
        assert await named(world) == 1
    without = make_run()
    async with running(memory_parts(without)) as world:
        await refused(world, ErrorCode.MALFORMED, "/v1/calibrations", amendment(without).to_bytes())


async def test_the_dossier_of_a_ban_holds_the_amendment_that_its_evidence_names(tmp_path: Path) -> None:
    run = calibrated_run()
    async with running(await folder_parts(run, tmp_path)) as world:
        await world.client(ANNA).add_amendment(amendment(run))
        await world.publish()
        await world.join(ANNA)
        lease = await world.lease(ANNA, rollouts_max=2)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        sums = {"logprob": Sums(num_tokens=60, log_e=(30.0,))}
        unknown = BundleEvidence(worker=NEW, validator=OLD, sums=sums, calibration=2)
        task = await world.take_task(VALIDATOR)
        for evidence in (unknown, unknown.model_copy(update={"calibration": 0})):
            with pytest.raises(RemoteError, match="calibration"):
                await world.give_verdict(task, evidence=evidence)
        await world.give_verdict(task, evidence=unknown.model_copy(update={"calibration": 1}))
        file = await case_in(world, tmp_path)
    code, found = check(file, "--run", run.digest)
    assert (code, found["ok"], found["kind"]) == (0, True, "statistical")
    lines = file.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if b"vnd.prime.calibration" not in line]
    assert len(kept) == len(lines) - 1
    file.write_bytes(b"".join(kept))
    code, found = check(file, "--run", run.digest)
    assert code == 1
    assert "calibration 1 is not known" in str(found["fault"])
