"""Every refusal of the real daemon, with its own code and status.

Each test begins with a message that is in order and changes one byte or one field of it.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    ENGINE,
    HEARTBEAT,
    TRAINER,
    World,
    folder_parts,
    make_manifest,
    make_run,
    memory_parts,
    refused,
    running,
    running_with_anna,
)

from prime_lab.memory_blobs import MemoryBlobs
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope, PayloadType, open_envelope, seal
from prime_protocol.errors import ErrorCode
from prime_protocol.parcel import pack_parcel
from prime_protocol.requests import (
    AdminRequest,
    BatchRequest,
    BlobHeader,
    BundleRequest,
    CheckRequest,
    CheckResultRequest,
    JoinRequest,
    LeaseRequest,
)
from prime_protocol.verdict import RejectReason, Verdict


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running_with_anna() as world:
        yield world


# Refusals of signed requests


async def test_a_flipped_byte_of_the_payload_breaks_the_signature(world: World) -> None:
    envelope = open_envelope(world.signed(HEARTBEAT, ANNA))
    payload = bytearray(envelope.payload)
    payload[-3] ^= 1
    body = Envelope(envelope.payload_type, bytes(payload), envelope.signatures).to_bytes()
    await refused(world, ErrorCode.BAD_SIGNATURE, "/v1/heartbeat", body)


async def test_a_flipped_byte_of_the_signature_is_refused(world: World) -> None:
    fields = json.loads(world.signed(HEARTBEAT, ANNA))
    signature = bytearray(base64.b64decode(fields["signatures"][0]["sig"]))
    signature[5] ^= 1
    fields["signatures"][0]["sig"] = base64.b64encode(signature).decode()
    await refused(world, ErrorCode.BAD_SIGNATURE, "/v1/heartbeat", json.dumps(fields).encode())


async def test_two_signers_are_one_too_many(world: World) -> None:
    body = seal(world.stamped(HEARTBEAT), PayloadType.REQUEST, ANNA, BEN).to_bytes()
    await refused(world, ErrorCode.BAD_SIGNATURE, "/v1/heartbeat", body)


async def test_a_signature_for_another_kind_of_payload_is_refused(world: World) -> None:
    body = seal(world.stamped(HEARTBEAT), PayloadType.LEASE, ANNA).to_bytes()
    await refused(world, ErrorCode.WRONG_PAYLOAD_TYPE, "/v1/heartbeat", body)


async def test_an_unknown_field_is_refused(world: World) -> None:
    await refused(world, ErrorCode.UNKNOWN_FIELD, "/v1/heartbeat", world.signed(HEARTBEAT, ANNA, extra=1))
    fields = {**json.loads(world.signed(HEARTBEAT, ANNA)), "extra": 1}
    await refused(world, ErrorCode.UNKNOWN_FIELD, "/v1/heartbeat", json.dumps(fields).encode())


@pytest.mark.parametrize(
    "change",
    [{"nonce": "short"}, {"issued_at_ms": "now"}, {"request": {"action": "dance"}}, {"run": 7}, {"issued_at_ms": -1}],
)
async def test_a_wrong_type_is_refused(world: World, change: dict[str, object]) -> None:
    await refused(world, ErrorCode.WRONG_TYPE, "/v1/heartbeat", world.signed(HEARTBEAT, ANNA, **change))


async def test_a_request_at_another_endpoint_is_refused(world: World) -> None:
    await refused(world, ErrorCode.WRONG_TYPE, "/v1/leave", world.signed(HEARTBEAT, ANNA))


async def test_a_request_for_another_run_is_refused(world: World) -> None:
    await refused(world, ErrorCode.WRONG_RUN, "/v1/heartbeat", world.signed(HEARTBEAT, ANNA, run="0" * 64))


async def test_a_request_works_once(world: World) -> None:
    body = world.signed(HEARTBEAT, ANNA)
    assert (await world.post("/v1/heartbeat", body))[0] == 200
    await refused(world, ErrorCode.REPLAYED, "/v1/heartbeat", body)


async def test_a_nonce_works_once(world: World) -> None:
    assert (await world.post("/v1/heartbeat", world.signed(HEARTBEAT, ANNA, nonce="a" * 32)))[0] == 200
    await refused(world, ErrorCode.REPLAYED, "/v1/heartbeat", world.signed(HEARTBEAT, ANNA, nonce="a" * 32))


@pytest.mark.parametrize("age_s", [-limits.REQUEST_AGE_S_MAX - 5, limits.REQUEST_AGE_S_MAX + 5])
async def test_a_request_from_another_time_is_refused(world: World, age_s: float) -> None:
    issued_at_ms = world.parts.clock.now_ms() - round(age_s * 1_000)
    await refused(world, ErrorCode.EXPIRED, "/v1/heartbeat", world.signed(HEARTBEAT, ANNA, issued_at_ms=issued_at_ms))


async def test_a_request_without_an_epoch_is_an_older_clients_and_is_told_to_upgrade(world: World) -> None:
    body = world.signed(HEARTBEAT, ANNA, epoch="")
    assert "run `prime-node upgrade`, or install the release" in await refused(
        world, ErrorCode.VERSION_UNSUPPORTED, "/v1/heartbeat", body
    )


@pytest.mark.parametrize("epoch", ["f" * 32, "0" * 32])
async def test_a_request_for_another_epoch_is_refused_and_told_the_present_one(world: World, epoch: str) -> None:
    body = world.signed(HEARTBEAT, ANNA, epoch=epoch)
    assert (await world.post("/v1/heartbeat", body))[1]["epoch"] == world.epoch
    await refused(world, ErrorCode.WRONG_EPOCH, "/v1/heartbeat", body)


async def test_a_key_that_never_joined_is_unknown(world: World) -> None:
    await refused(world, ErrorCode.UNKNOWN_WORKER, "/v1/heartbeat", world.signed(HEARTBEAT, BEN))


@pytest.mark.parametrize(
    ("path", "request_"),
    [
        ("check", CheckRequest(policy_versions=())),
        ("check_result", CheckResultRequest(bundle="0" * 64, verdict=Verdict.refuse(RejectReason.STALE), rewards=())),
        ("batch", BatchRequest(step=0, durable_step=0)),
        ("bundle", BundleRequest(bundle="0" * 64)),
        ("admin", AdminRequest(action="drain")),
    ],
)
async def test_a_worker_may_not_do_what_is_for_trusted_keys(world: World, path: str, request_: CheckRequest) -> None:
    await refused(world, ErrorCode.WRONG_ROLE, f"/v1/{path}", world.signed(request_, ANNA))


async def test_a_key_of_low_order_is_refused(world: World) -> None:
    weak = "12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw"  # 32 zero bytes
    request = JoinRequest(name="weak", software="1", engine=ENGINE, rollouts_max=1)
    fields = json.loads(world.signed(request, ANNA))
    fields["signatures"][0]["keyid"] = weak
    await refused(world, ErrorCode.BAD_KEY, "/v1/join", json.dumps(fields).encode())


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"payload":1,"payload":2}', b"\xff", b"[" * 100])
async def test_what_is_no_envelope_is_refused(world: World, body: bytes) -> None:
    status, answer = await world.post("/v1/heartbeat", body)
    assert (status, answer["code"]) in {(400, "malformed"), (413, "too_large")}


async def test_a_body_without_a_length_and_an_oversize_one_are_refused(world: World) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65_536

    try:
        async with world.session.post(world.url + "/v1/heartbeat", data=endless()) as answer:
            assert answer.status == 400
    except (ConnectionError, OSError):
        pass  # cut off while sending, which is as good
    await refused(world, ErrorCode.TOO_LARGE, "/v1/heartbeat", b"x" * 600_000)


async def test_a_compressed_body_is_refused(world: World) -> None:
    await refused(world, ErrorCode.MALFORMED, "/v1/heartbeat", b"x", **{"Content-Encoding": "gzip"})


async def test_faulty_requests_from_one_address_shut_out_only_strangers() -> None:
    async with running(memory_parts(make_run(), faults_per_second=0.1), ANNA) as world:
        for _ in range(10):
            await refused(world, ErrorCode.MALFORMED, "/v1/heartbeat", b"rubbish")
        stranger = JoinRequest(name="ben", software="1", engine=ENGINE, rollouts_max=8)
        forged = json.loads(world.signed(stranger, BEN))
        forged["signatures"][0]["sig"] = base64.b64encode(b"x" * 64).decode()
        await refused(world, ErrorCode.TOO_MANY_REQUESTS, "/v1/join", json.dumps(forged).encode())
        await refused(world, ErrorCode.TOO_MANY_REQUESTS, "/v1/join", world.signed(stranger, BEN))
        await refused(world, ErrorCode.TOO_MANY_REQUESTS, "/v1/heartbeat", world.signed(HEARTBEAT, BEN))
        await world.fill(0)  # worker, validator and trainer continue
        await world.publish()
        await world.join(ANNA)


async def test_a_worker_that_asks_too_often_is_slowed_down() -> None:
    async with running(memory_parts(make_run(), requests_per_second=0.3)) as world:
        await world.join(ANNA)
        codes = [(await world.post("/v1/heartbeat", world.signed(HEARTBEAT, ANNA)))[0] for _ in range(3)]
        assert codes == [200, 200, 429]


# Refusals of publications


async def test_a_manifest_whose_parts_are_missing_is_refused(world: World) -> None:
    await world.fill(0)
    manifest, _ = make_manifest(world.run, world.head, batch=world.batch)
    await refused(world, ErrorCode.NOT_FOUND, "/v1/manifests", manifest.envelope.to_bytes())


async def test_a_manifest_by_another_key_is_refused(world: World) -> None:
    manifest, _ = make_manifest(world.run, world.head, batch="0" * 64)
    body = seal(manifest.manifest, PayloadType.MANIFEST, ANNA).to_bytes()
    await refused(world, ErrorCode.WRONG_ROLE, "/v1/manifests", body)


async def test_a_manifest_that_skips_its_predecessor_is_refused(world: World) -> None:
    await world.fill(0)
    manifest, _ = make_manifest(world.run, world.head, batch=world.batch, previous="0" * 64)
    await refused(world, ErrorCode.CHAIN_BROKEN, "/v1/manifests", manifest.envelope.to_bytes())


async def test_a_policy_before_the_batch_that_it_is_trained_on_is_refused(world: World) -> None:
    manifest, parts = make_manifest(world.run, world.head, batch="0" * 64)
    await world.client(TRAINER).put_blob(parts[0])
    detail = await refused(world, ErrorCode.CHAIN_BROKEN, "/v1/manifests", manifest.envelope.to_bytes())
    assert "before the coordinator chose the batch of step 0" in detail


async def test_a_policy_from_another_batch_than_the_one_handed_out_is_refused(world: World) -> None:
    await world.fill(0)
    manifest, parts = make_manifest(world.run, world.head, batch="0" * 64)
    await world.client(TRAINER).put_blob(parts[0])
    await refused(world, ErrorCode.CHAIN_BROKEN, "/v1/manifests", manifest.envelope.to_bytes())


async def test_a_second_manifest_for_one_policy_is_a_fork_and_both_are_kept(tmp_path: Path) -> None:
    async with running(await folder_parts(make_run(), tmp_path)) as world:
        first = await world.publish()
        await world.client(TRAINER).publish(first.envelope)  # the same one again is no fork
        second, _ = make_manifest(world.run, None, created_at_ms=1)
        await refused(world, ErrorCode.FORK, "/v1/manifests", second.envelope.to_bytes())
        kept = {open_envelope(path.read_bytes()).digest for path in (tmp_path / "evidence" / "forks").iterdir()}
        assert kept == {first.digest, second.digest}
        assert (await world.client(ANNA).manifest(0)).digest == first.digest


async def test_a_lease_for_other_weights_than_the_published_ones_is_refused(world: World) -> None:
    request = LeaseRequest(policy_version=0, policy_digest="0" * 64, rollouts_max=8)
    await refused(world, ErrorCode.CHAIN_BROKEN, "/v1/lease", world.signed(request, ANNA))


async def test_a_blob_by_a_worker_is_refused(world: World) -> None:
    header = BlobHeader(body_digest=digest_of(b"x"), body_bytes=1, run=world.run.digest, issued_at_ms=0)
    await refused(world, ErrorCode.WRONG_ROLE, "/v1/blobs", pack_parcel(header, b"x", PayloadType.BLOB, ANNA))


# Faults of our own


class Broken(MemoryBlobs):
    """A store that always fails."""

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        raise RuntimeError("secret inside")


async def test_a_fault_of_our_own_shows_nothing_of_its_inside_and_promises_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts = dataclasses.replace(memory_parts(make_run()), public=Broken())
    async with running(parts) as world:
        header = BlobHeader(
            body_digest=digest_of(b"x"),
            body_bytes=1,
            run=world.run.digest,
            issued_at_ms=parts.clock.now_ms(),
            epoch=world.epoch,
        )
        parcel = pack_parcel(header, b"x", PayloadType.BLOB, TRAINER)
        detail = await refused(world, ErrorCode.INTERNAL, "/v1/blobs", parcel)
        assert "secret" not in detail
        assert "secret inside" in caplog.text
