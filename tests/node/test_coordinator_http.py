"""The real daemon over loopback: the whole flow, and all public reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    HEARTBEAT,
    ROOT,
    TRAINER,
    VALIDATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    refused,
    running,
    running_with_anna,
)

from prime_node.adapters.web.http_client import HttpClient
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import NotYet, UploadReply
from prime_protocol.requests import (
    AdminRequest,
    BatchRequest,
    BundleRequest,
    CheckRequest,
    LeaseRequest,
    LeaveRequest,
    ReceiptsRequest,
    ReturnLeaseRequest,
)
from prime_protocol.rollout import RolloutHeader
from prime_protocol.verdict import BundleStatus, Receipt, RejectReason, Verdict


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running_with_anna() as world:
        yield world


# The flow


async def test_a_step_goes_from_lease_to_batch(world: World) -> None:
    batch = await world.fill(0)
    assert [group.slot for group in batch.groups] == [0, 1, 2, 3]
    assert {group.worker for group in batch.groups} == {ANNA.key_id}
    assert batch.groups[1].rewards == (0.0, 1.0)
    again = await world.client(TRAINER).batch(BatchRequest(step=0, durable_step=0))
    assert isinstance(again, Envelope)
    assert again.digest == seal(batch, PayloadType.BATCH, COORDINATOR).digest
    bundle = await world.client(TRAINER).bundle(BundleRequest(bundle=batch.groups[0].bundle))
    assert digest_of(bundle) == batch.groups[0].bundle


async def test_every_completion_has_its_own_seed_and_every_slot_of_a_step_its_own_problem(world: World) -> None:
    lease = await world.lease(ANNA)
    seeds = [seed for group in lease.groups for seed in group.seeds]
    assert len(set(seeds)) == len(seeds) == lease.num_rollouts
    assert len({group.problem.index for group in lease.groups}) == len(lease.groups)


async def test_handing_a_lease_back_gives_no_other_seeds_but_a_new_policy_does(world: World) -> None:
    first = await world.lease(ANNA)
    await world.client(ANNA).return_lease(ReturnLeaseRequest(lease_id=first.lease_id))
    second = await world.lease(ANNA)
    assert first.groups == second.groups
    await world.client(ANNA).upload(make_parcel(second, ANNA))
    await world.judge()
    ahead = await world.lease(ANNA)
    await world.client(ANNA).return_lease(ReturnLeaseRequest(lease_id=ahead.lease_id))
    await world.fill(0)
    await world.publish()
    fresher = await world.lease(ANNA)
    assert ahead.step == fresher.step == 1
    assert [group.problem for group in ahead.groups] == [group.problem for group in fresher.groups]
    assert ahead.groups[0].seeds != fresher.groups[0].seeds


async def test_a_refused_bundle_is_leased_again_and_the_worker_can_read_why(world: World) -> None:
    lease = await world.lease(ANNA)
    parcel = make_parcel(lease, ANNA)
    assert (await world.client(ANNA).upload(parcel)).verdict is None
    await world.judge(reason=RejectReason.SEED_MISMATCH)
    verdict = (await world.client(ANNA).upload(parcel)).verdict
    assert verdict is not None
    assert verdict.reason is RejectReason.SEED_MISMATCH
    assert [group.slot for group in (await world.lease(ANNA)).groups] == [group.slot for group in lease.groups]
    listed = await world.client(ANNA).receipts(ReceiptsRequest())
    payload = open_envelope(listed.receipts[-1].encode()).verify(PayloadType.RECEIPT, trusted=(COORDINATOR.key_id,))
    receipt = parse_json(payload, Receipt)
    assert (receipt.status, receipt.reason) == (BundleStatus.REFUSED, RejectReason.SEED_MISMATCH)


async def test_the_same_bundle_twice_gets_the_same_answer_and_counts_once(world: World) -> None:
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    answers = [await world.client(ANNA).upload(parcel) for _ in range(3)]
    assert answers == [answers[0]] * 3
    assert (await world.status())["pending_bundles"] == 1


async def test_the_same_bundle_many_times_at_once_is_taken_once(world: World) -> None:
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    answers = await asyncio.gather(*(world.client(ANNA).upload(parcel) for _ in range(8)))
    assert all(answer.verdict is None for answer in answers)
    assert (await world.status())["pending_bundles"] == 1


@pytest.mark.parametrize("judged", [False, True])
async def test_two_bundles_for_one_lease_are_a_strike_and_both_headers_are_kept(world: World, judged: bool) -> None:
    lease = await world.lease(ANNA)
    first, other = make_parcel(lease, ANNA), make_parcel(lease, ANNA, created_at_ms=1)
    await world.client(ANNA).upload(first)
    if judged:
        await world.judge()
    verdict = (await world.client(ANNA).upload(other)).verdict
    assert verdict is not None
    assert verdict.reason is RejectReason.EQUIVOCATION
    (worker,) = [each for each in (await world.status())["workers"] if each["worker"] == ANNA.key_id]
    assert (worker["strikes"], worker["accepted"]) == (1, 0)
    assert worker["refused"] == {"equivocation": lease.num_rollouts}
    kept = await world.parts.private.read(f"equivocation-{ANNA.key_id}-{lease.lease_id[:16]}.jsonl")
    headers = [open_envelope(line).verify(PayloadType.ROLLOUT, trusted=(ANNA.key_id,)) for line in kept.splitlines()]
    assert len({parse_json(header, RolloutHeader).created_at_ms for header in headers}) == 2
    again = (await world.client(ANNA).upload(other)).verdict
    assert again is not None
    assert again.reason is RejectReason.DUPLICATE, "one strike is enough"
    answer = (await world.client(ANNA).upload(first)).verdict
    assert answer is not None
    assert answer.reason is RejectReason.EQUIVOCATION


@pytest.mark.parametrize("judged", [False, True])
async def test_a_header_that_another_key_signed_makes_no_second_bundle(world: World, judged: bool) -> None:
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    first = await world.client(ANNA).upload(parcel)
    if judged:
        await world.judge()
    broken = parcel[:-1] + bytes([parcel[-1] ^ 1])
    await refused(world, ErrorCode.DIGEST_MISMATCH, "/v1/rollouts", broken)
    length = int.from_bytes(parcel[4:8], "big")
    wrapped = parcel[:4] + (length + 1).to_bytes(4, "big") + b" " + parcel[8:]
    status, answer = await world.post("/v1/rollouts", wrapped)
    assert status == 200
    assert UploadReply.model_validate(answer).verdict == (Verdict.accept() if judged else first.verdict)
    (worker,) = [each for each in (await world.status())["workers"] if each["worker"] == ANNA.key_id]
    assert (worker["strikes"], worker["refused"]) == (0, {})


async def test_a_bundle_for_a_returned_lease_is_refused_once_and_for_all(world: World) -> None:
    lease = await world.lease(ANNA)
    await world.client(ANNA).return_lease(ReturnLeaseRequest(lease_id=lease.lease_id))
    parcel = make_parcel(lease, ANNA)
    verdicts = [(await world.client(ANNA).upload(parcel)).verdict for _ in range(2)]
    assert verdicts[0] == verdicts[1]
    assert verdicts[0] is not None
    assert verdicts[0].reason is RejectReason.LEASE_EXPIRED


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"step": 3, "policy_version": 1}, RejectReason.FUTURE), ({"policy_version": 1}, RejectReason.FUTURE)],
)
async def test_a_rollout_from_the_future_is_refused(world: World, change: dict[str, Any], reason: RejectReason) -> None:
    verdict = (await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA, **change))).verdict
    assert verdict is not None
    assert verdict.reason is reason


async def test_a_rollout_for_a_trained_step_is_stale(world: World) -> None:
    await world.fill(0)
    await world.publish()
    lease = await world.lease(ANNA)
    verdict = (await world.client(ANNA).upload(make_parcel(lease, ANNA, step=0))).verdict
    assert verdict is not None
    assert verdict.reason is RejectReason.STALE


async def test_an_expired_lease_goes_to_another_worker() -> None:
    run = make_run(lease_seconds=0.2, heartbeat_seconds=0.1, groups_per_step=1, async_level=0)
    async with running(memory_parts(run), ANNA, BEN) as world:
        lost = await world.lease(ANNA)
        assert (await world.lease(BEN, wait_s=5.0)).groups == lost.groups


async def test_a_worker_that_abandons_its_leases_learns_why_and_how_long_it_waits(world: World) -> None:
    for _ in range(2):
        lease = await world.lease(ANNA)
        await world.client(ANNA).return_lease(ReturnLeaseRequest(lease_id=lease.lease_id))
    assert world.head is not None
    request = LeaseRequest(policy_version=0, policy_digest=world.head.digest, rollouts_max=64, wait_s=30.0)
    answer = await world.client(ANNA).lease(request)
    assert isinstance(answer, NotYet)
    assert "you abandoned" in answer.reason
    assert 0.5 < answer.retry_after_s <= 1.0


async def test_a_lease_whose_answer_was_lost_is_given_out_again_at_once(world: World) -> None:
    lost = await world.lease(ANNA)
    kept = await world.lease(ANNA, holding=())
    assert [group.slot for group in kept.groups] == [group.slot for group in lost.groups]
    assert (await world.lease(ANNA, holding=(kept.lease_id,))).step == 1
    assert (await world.status())["open_leases"] == 2


async def test_a_silent_worker_loses_its_lease_and_may_join_again() -> None:
    async with running(memory_parts(make_run(heartbeat_seconds=0.1)), ANNA) as world:
        await world.lease(ANNA)
        await world.until_status("open_leases", 0)
        with pytest.raises(RemoteError) as caught:
            await world.client(ANNA).heartbeat(HEARTBEAT)
        assert caught.value.code is ErrorCode.UNKNOWN_WORKER
        await world.join(ANNA)
        assert (await world.lease(ANNA)).groups


async def test_a_lease_request_is_held_open_until_a_policy_makes_it_possible() -> None:
    async with running(memory_parts(make_run(async_level=0, groups_per_step=1)), ANNA, BEN) as world:
        lease = await world.lease(ANNA)
        waiting = asyncio.create_task(world.lease(BEN, wait_s=10.0))
        await asyncio.sleep(0)
        await world.client(ANNA).return_lease(ReturnLeaseRequest(lease_id=lease.lease_id))
        assert (await asyncio.wait_for(waiting, 5)).groups[0].slot == 0


async def test_a_batch_request_is_held_open_until_the_last_verdict(world: World) -> None:
    lease = await world.lease(ANNA)
    waiting = asyncio.create_task(world.client(TRAINER).batch(BatchRequest(step=0, durable_step=0, wait_s=10.0)))
    await world.client(ANNA).upload(make_parcel(lease, ANNA))
    await world.judge()
    assert isinstance(await asyncio.wait_for(waiting, 5), Envelope)


async def test_an_early_request_gets_the_reason_why_the_run_waits(world: World) -> None:
    answer = await world.client(TRAINER).batch(BatchRequest(step=0, durable_step=0))
    assert isinstance(answer, NotYet)
    assert "4 groups of step 0 are open" in answer.reason


async def test_a_bundle_that_no_validator_judges_goes_to_another_and_then_back_to_the_workers() -> None:
    async with running(memory_parts(make_run(), check_seconds=0.05, check_attempts_max=2), ANNA) as world:
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
        for asks_left in (False, True):
            asked = CheckRequest(policy_versions=(), wait_s=5.0, asks_left=asks_left)
            task = await world.client(VALIDATOR).check(asked)
            assert not isinstance(task, NotYet)
            assert task.left_ms is None if not asks_left else (task.left_ms or 0) > 50, (
                "and time for the lease's tokens"
            )
        await world.until_status("pending_bundles", 0)
        assert (await world.status())["rollouts"]["refused"] == {"unverifiable": 8}


async def test_a_cheat_is_banned_and_all_its_requests_are_refused(world: World) -> None:
    for _ in range(2):
        await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
        await world.judge(reason=RejectReason.LOGPROB_MISMATCH)
    body = world.signed(HEARTBEAT, ANNA)
    await refused(world, ErrorCode.BANNED, "/v1/heartbeat", body)
    worker = (await world.status())["workers"][0]
    assert worker["banned"]["evidence"]
    assert worker["refused"] == {"logprob_mismatch": 16}


async def test_the_operator_bans_unbans_and_drains(world: World) -> None:
    operator = world.client(ROOT)
    await operator.admin(AdminRequest(action="ban", worker=ANNA.key_id, reason="test"))
    await refused(world, ErrorCode.BANNED, "/v1/heartbeat", world.signed(HEARTBEAT, ANNA))
    await operator.admin(AdminRequest(action="unban", worker=ANNA.key_id))
    await world.join(ANNA)
    await operator.admin(AdminRequest(action="drain"))
    assert (await world.client(ANNA).heartbeat(HEARTBEAT)).draining


async def test_a_worker_that_leaves_is_unknown_afterwards(world: World) -> None:
    await world.client(ANNA).leave(LeaveRequest())
    await refused(world, ErrorCode.UNKNOWN_WORKER, "/v1/heartbeat", world.signed(HEARTBEAT, ANNA))


# Public reading


async def test_head_is_empty_before_the_first_policy_and_has_a_tag_afterwards() -> None:
    async with running(memory_parts(make_run())) as world:
        assert (await world.get("/v1/head"))[0] == 204
        manifest = await world.publish()
        status, body, headers = await world.get("/v1/head")
        assert (status, open_envelope(body).digest) == (200, manifest.digest)
        assert (await world.get("/v1/head", **{"If-None-Match": headers["ETag"]}))[0] == 304


async def test_everything_published_can_be_read_by_anyone(world: World) -> None:
    reader = HttpClient(world.url, run=world.run.digest, clock=world.parts.clock)
    assert (await reader.run_spec()).digest == world.run.digest
    manifest = await reader.manifest(0)
    assert world.head is not None
    assert manifest.digest == world.head.digest
    part = world.head.manifest.encodings[0].parts[0]
    data = await reader.blob(part.digest)
    assert digest_of(data) == part.digest
    assert await reader.blob(part.digest, start=3, end=9) == data[3:9]
    await reader.close()


@pytest.mark.parametrize("wanted", ["bytes=99999999-", "bytes=5-3", "bytes=a-b", "bytes=0-1,4-5", "lines=1-2"])
async def test_a_range_that_does_not_exist_is_refused(world: World, wanted: str) -> None:
    assert world.head is not None
    status, body, _ = await world.get(f"/v1/blobs/{world.head.manifest.encodings[0].parts[0].digest}", Range=wanted)
    assert (status, json.loads(body)["code"]) == (416, "bad_range")


async def test_an_uploaded_bundle_is_no_public_blob(world: World) -> None:
    reply = await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
    assert (await world.get(f"/v1/blobs/{reply.bundle}"))[0] == 404


@pytest.mark.parametrize(
    "path",
    [
        "/v1/blobs/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/blobs/%2e%2e",
        "/v1/blobs/" + "A" * 64,
        "/v1/blobs/" + "0" * 63 + "%00",
        "/v1/manifests/..%2frun.json",
        "/v1/manifests/-1",
        "/v1/manifests/99999999999999999999",
        "/v1/nothing",
    ],
)
async def test_no_path_leads_out_of_the_folder(tmp_path: Path, path: str) -> None:
    async with running(await folder_parts(make_run(), tmp_path)) as world:
        status, body, _ = await world.get(path)
        assert (status, json.loads(body)["code"]) == (404, "not_found")


async def test_health_status_and_metrics_answer(world: World) -> None:
    assert json.loads((await world.get("/healthz"))[1])["ok"] is True
    status = await world.status()
    assert status["head"] == 0
    assert status["workers"][0]["worker"] == ANNA.key_id
    assert status["waiting_for"] == ["workers to request leases; 4 groups of step 0 are open"]
    text = (await world.get("/metrics"))[1].decode()
    assert "prime_workers 1.0" in text
    assert "prime_paused 0.0" in text
    async with world.session.head(world.url + "/v1/head") as answer:
        assert answer.status == 200
