"""Each refusal of a bundle or a verdict by the real daemon: a valid message with one change."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import zstandard
from tests.builder import build_header
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    refused,
    running,
    running_with_anna,
)

from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.api.intake import decide_upload
from prime_node.coordinator.assembly import open_coordinator
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import LeaseRecord
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.parcel import open_parcel, pack_parcel
from prime_protocol.replies import NotYet
from prime_protocol.requests import BlobHeader, BundleRequest, CheckResultRequest, LeaseRequest, ReturnLeaseRequest
from prime_protocol.rollout import RolloutHeader, body_bytes_max, parse_body
from prime_protocol.verdict import RejectReason, Verdict


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running_with_anna() as world:
        yield world


async def test_a_bundle_with_a_flipped_byte_in_its_body_is_refused(world: World) -> None:
    parcel = bytearray(make_parcel(await world.lease(ANNA), ANNA))
    parcel[-1] ^= 1
    await refused(world, ErrorCode.DIGEST_MISMATCH, "/v1/rollouts", bytes(parcel))


async def test_a_bundle_with_a_flipped_byte_in_its_header_is_refused(world: World) -> None:
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    envelope = open_parcel(parcel, body_bytes_max=2**20).envelope
    tampered = Envelope(envelope.payload_type, envelope.payload.replace(b'"step":0', b'"step":1'), envelope.signatures)
    head = tampered.to_bytes()
    body = bytes(open_parcel(parcel, body_bytes_max=2**20).body)
    await refused(world, ErrorCode.BAD_SIGNATURE, "/v1/rollouts", b"PRP1" + len(head).to_bytes(4, "big") + head + body)


async def test_a_bundle_for_the_lease_of_somebody_else_is_refused(world: World) -> None:
    await world.join(BEN)
    lease = await world.lease(ANNA)
    await refused(world, ErrorCode.LEASE_FOREIGN, "/v1/rollouts", make_parcel(lease, BEN))
    with pytest.raises(RemoteError) as caught:
        await world.client(BEN).return_lease(ReturnLeaseRequest(lease_id=lease.lease_id))
    assert caught.value.code is ErrorCode.LEASE_FOREIGN


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (ErrorCode.LEASE_UNKNOWN, lambda fields: {"lease_id": "0" * 64}),
        (ErrorCode.WRONG_RUN, lambda fields: {"run": "0" * 64}),
        (ErrorCode.BAD_SIGNATURE, lambda fields: {"worker": BEN.key_id}),
        (ErrorCode.DECOMPRESSED_TOO_LARGE, lambda fields: {"decompressed_bytes": 2**40}),
        (ErrorCode.WRONG_TYPE, lambda fields: {"lease_digest": "0" * 64}),
    ],
)
async def test_a_bundle_with_one_wrong_field_is_refused(
    world: World, code: ErrorCode, change: Callable[[None], dict[str, Any]]
) -> None:
    await refused(world, code, "/v1/rollouts", make_parcel(await world.lease(ANNA), ANNA, **change(None)))


async def test_a_bundle_over_the_size_limit_is_refused() -> None:
    run = make_run(limits=limits.Limits(rollout_bytes_max=2_048))
    async with running(memory_parts(run), ANNA) as world:
        await refused(
            world, ErrorCode.TOO_LARGE, "/v1/rollouts", make_parcel(await world.lease(ANNA), ANNA, body=b"x" * 2_049)
        )


async def test_a_bundle_larger_than_its_lease_can_need_is_refused_and_not_stored(world: World) -> None:
    lease = await world.lease(ANNA, rollouts_max=2)
    bound = body_bytes_max(num_rollouts=2, completion_tokens_max=4)
    large = make_parcel(lease, ANNA, body=b"x" * (bound + 1))
    await refused(world, ErrorCode.TOO_LARGE, "/v1/rollouts", large)
    swollen = make_parcel(lease, ANNA, decompressed_bytes=bound + 1)
    await refused(world, ErrorCode.DECOMPRESSED_TOO_LARGE, "/v1/rollouts", swollen)
    assert [digest async for digest in world.parts.bundles.digests()] == []
    assert (await world.client(ANNA).upload(make_parcel(lease, ANNA))).verdict is None


async def test_uploads_count_against_the_workers_rate() -> None:
    async with running(memory_parts(make_run(), requests_per_second=0.3), ANNA) as world:
        lease = await world.lease(ANNA)
        codes = [(await world.post("/v1/rollouts", make_parcel(lease, ANNA, created_at_ms=n)))[0] for n in range(2)]
        assert codes == [200, 429]


async def test_bundles_sent_again_have_a_rate_of_their_own() -> None:
    async with running(memory_parts(make_run(), requests_per_second=0.3), ANNA) as world:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        codes = [(await world.post("/v1/rollouts", parcel))[0] for _ in range(5)]
        assert codes == [200, 200, 200, 200, 429]


async def test_a_late_bundle_waits_until_fewer_of_its_workers_wait_for_a_verdict() -> None:
    bounds = limits.Limits(bundles_pending_per_worker_max=2)
    coordinator = await open_coordinator(memory_parts(make_run(limits=bounds)))
    decisions, leasing = coordinator.decisions, coordinator.handlers.leasing
    anna, ben = ANNA.key_id, BEN.key_id
    for worker in (anna, ben):
        decisions.decide(ev.WorkerJoined(worker, worker, "1", "e", 64))
    decisions.decide(ev.ManifestPublished(0, "d" * 64, (UpdateRoute(None, 1),)))
    asked = LeaseRequest(policy_version=0, policy_digest="d" * 64, rollouts_max=2)

    async def leased(worker: str) -> LeaseRecord:
        assert not isinstance(await leasing.lease(worker, asked), NotYet)
        return list(decisions.state.leases.values())[-1]

    lapsed = [await leased(worker) for worker in (ben, ben, anna)]
    decisions.decide(ev.LeasesExpired(tuple(lease.lease_id for lease in lapsed)))
    late = lapsed[-1]
    header = build_header(coordinator.assigner.lease(late), b"", 1, worker=anna)
    for number in range(2):
        assert isinstance(decide_upload(decisions.state, header, late, bundle="late", num_bytes=1), ev.BundleArrived)
        lease = await leased(anna)  # the slots that were ben's
        decisions.decide(ev.BundleArrived(f"{number:064d}", lease.lease_id, anna, 2, 1))
    with pytest.raises(RemoteError, match="your earlier bundles still wait") as caught:
        decide_upload(decisions.state, header, late, bundle="late", num_bytes=1)
    assert caught.value.code is ErrorCode.TOO_MANY_REQUESTS
    refusal = await leasing.lease(anna, asked)
    assert isinstance(refusal, NotYet)
    assert (
        refusal.reason == "2 of your bundles wait for a validator and you hold 0 leases: together they reach the limit"
    )


@pytest.mark.parametrize("parcel", [b"", b"PRP0" + b"\0" * 20, b"PRP1" + b"\0\0\1\0" + b"{}"])
async def test_what_is_no_parcel_is_refused(world: World, parcel: bytes) -> None:
    await refused(world, ErrorCode.MALFORMED, "/v1/rollouts", parcel)


async def test_a_bundle_of_another_payload_type_is_refused(world: World) -> None:
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    body = bytes(open_parcel(parcel, body_bytes_max=2**20).body)
    header = BlobHeader(body_digest=digest_of(body), body_bytes=len(body), run=world.run.digest, issued_at_ms=0)
    other = pack_parcel(header, body, PayloadType.BLOB, ANNA)
    await refused(world, ErrorCode.WRONG_PAYLOAD_TYPE, "/v1/rollouts", other)


async def test_a_zstd_bomb_reaches_the_validator_and_no_further(world: World) -> None:
    bomb = zstandard.ZstdCompressor().compress(b"\0" * 2**24)
    parcel = make_parcel(await world.lease(ANNA), ANNA, body=bomb, decompressed_bytes=4_096)
    reply = await world.client(ANNA).upload(parcel)
    bundle = await world.client(VALIDATOR).bundle(BundleRequest(bundle=reply.bundle))
    opened = open_parcel(bundle, body_bytes_max=2**20)
    header = parse_json(opened.envelope.payload, RolloutHeader)
    with pytest.raises(RemoteError) as caught:
        parse_body(header, opened.check_body(header), world.run.spec.limits)
    assert caught.value.code is ErrorCode.DECOMPRESSED_TOO_LARGE
    await world.judge(reason=RejectReason.MALFORMED)
    assert (await world.status())["rollouts"]["refused"] == {"malformed": 8}


async def test_a_verdict_with_too_few_rewards_is_refused(world: World) -> None:
    reply = await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
    await world.take_task(VALIDATOR)
    with pytest.raises(RemoteError) as caught:
        await world.client(VALIDATOR).check_result(
            CheckResultRequest(bundle=reply.bundle, verdict=Verdict.accept(), rewards=(1.0,))
        )
    assert caught.value.code is ErrorCode.WRONG_TYPE


async def test_the_first_verdict_stands(world: World) -> None:
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    await world.client(ANNA).upload(parcel)
    task = await world.judge()
    refusal = CheckResultRequest(bundle=task.bundle, verdict=Verdict.refuse(RejectReason.MALFORMED), rewards=())
    await world.client(VALIDATOR).check_result(refusal)
    assert (await world.client(ANNA).upload(parcel)).verdict == Verdict.accept()
