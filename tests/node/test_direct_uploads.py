"""Workers that put bodies into the bucket themselves: real coordinator, real S3. What the bucket holds is not trusted."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    TRAINER,
    VALIDATOR,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    refused,
    running,
)
from tests.node.gateway_world import LISTENS, gateway_parts, hearing, serving

from prime_lab.memory_blobs import MemoryBlobs
from prime_lab.s3_server import BUCKET, S3Server
from prime_node.adapters.system_clock import SystemClock
from prime_node.cli.wire_store import open_blobs
from prime_node.coordinator.api.direct_uploads import DirectBucket
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.blobs import Blobs
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.limits import Limits
from prime_protocol.parcel import open_parcel
from prime_protocol.requests import UploadUrlRequest

RUN = make_run(heartbeat_seconds=300.0, limits=Limits(blob_bytes_max=2**17, rollout_bytes_max=2**17))


class Later(SystemClock):
    """The clock of a machine, half an hour ahead."""

    def now_ms(self) -> int:
        return super().now_ms() + 1_800_000


class Watched:
    """The bucket's blobs, with counts of the bodies that the coordinator has read there, and of those that it has looked for."""

    def __init__(self, blobs: Blobs) -> None:
        self.blobs, self.read, self.asked = blobs, 0, 0

    async def size(self, digest: str) -> int:
        self.asked += 1
        return await self.blobs.size(digest)

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        self.read += 1
        return await self.blobs.get(digest, start=start, end=end)

    def __getattr__(self, name: str) -> object:
        return getattr(self.blobs, name)


class ClosedBucket:
    """URLs at which nothing listens."""

    def url(self, name: str, *, body_bytes: int, sha256: bytes) -> str:
        return "http://127.0.0.1:9/bucket/name"


async def direct_parts(folder: Path, **settings: object) -> tuple[Parts, Watched]:
    """Return the parts of a coordinator with a bucket, and what it reads there."""
    place = f"s3://{BUCKET}/{folder.name}"
    parts = await folder_parts(RUN, folder, blobs=place, uploads="direct", **settings)
    assert parts.direct is not None
    watched = Watched(parts.direct.incoming)
    return replace(parts, direct=replace(parts.direct, incoming=cast("Blobs", watched))), watched


@contextlib.asynccontextmanager
async def with_anna(parts: Parts) -> AsyncIterator[World]:
    """Run a coordinator with policy 0 and ANNA, who puts the smallest body into the bucket."""
    async with running(parts) as world:
        world.client(ANNA).direct_bytes_min = 1
        await world.publish()
        await world.join(ANNA)
        yield world


@pytest_asyncio.fixture
async def direct(tmp_path: Path, s3: S3Server) -> AsyncIterator[tuple[World, Watched]]:
    parts, watched = await direct_parts(tmp_path)
    async with with_anna(parts) as world:
        yield world, watched


async def names(blobs: Blobs) -> list[str]:
    return [name async for name in blobs.digests()]


def split(parcel: bytes) -> tuple[bytes, bytes]:
    """Return a parcel's header and body."""
    body = bytes(open_parcel(parcel, body_bytes_max=len(parcel)).body)
    return parcel[: -len(body)], body


async def test_a_body_goes_through_the_bucket_and_becomes_the_same_bundle(direct: tuple[World, Watched]) -> None:
    world, bucket = direct
    parcel = make_parcel(await world.lease(ANNA), ANNA)
    reply = await world.client(ANNA).upload(parcel)
    assert bucket.read == 1
    assert await world.parts.bundles.get(reply.bundle) == parcel
    assert await names(bucket.blobs) == []
    assert (await world.judge()).bundle == reply.bundle
    again = await world.client(ANNA).upload(
        parcel
    )  # as if the answer had been lost: no lease waits for it, so it goes whole
    assert (again.bundle, bucket.read) == (reply.bundle, 1)


async def test_small_bodies_and_those_for_a_coordinator_without_the_setting_go_whole(
    tmp_path: Path, s3: S3Server
) -> None:
    parts, bucket = await direct_parts(tmp_path)
    async with with_anna(parts) as world:
        world.client(ANNA).direct_bytes_min = 2**20
        reply = await world.client(ANNA).upload(make_parcel(await world.lease(ANNA), ANNA))
        assert await parts.bundles.has(reply.bundle)
    other = await folder_parts(RUN, tmp_path / "other", blobs=f"s3://{BUCKET}/{tmp_path.name}/other")
    async with with_anna(other) as world:
        lease = await world.lease(ANNA)
        parcel = make_parcel(lease, ANNA)
        await refused(world, ErrorCode.NOT_FOUND, "/v1/upload_url", world.signed(asked(lease.lease_id, b"x"), ANNA))
        await refused(world, ErrorCode.NOT_FOUND, "/v1/rollouts", split(parcel)[0])
        reply = await world.client(ANNA).upload(parcel)
        assert await other.bundles.has(reply.bundle)
    assert bucket.read == 0
    with pytest.raises(LocalError, match="needs a bucket"):
        CoordinatorConfig.load({"coordinator": {"uploads": "direct"}})


async def test_a_worker_that_does_not_reach_the_bucket_sends_bundles_whole(tmp_path: Path, s3: S3Server) -> None:
    parts, bucket = await direct_parts(tmp_path)
    async with with_anna(replace(parts, direct=DirectBucket(cast("Blobs", bucket), ClosedBucket()))) as world:
        for _ in range(2):
            parcel = make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA)
            reply = await world.client(ANNA).upload(parcel)
            assert await parts.bundles.get(reply.bundle) == parcel
    assert bucket.read == 0


async def test_what_the_bucket_holds_is_checked_before_it_counts(direct: tuple[World, Watched]) -> None:
    """As if the service enforced nothing: the header is refused, the object deleted, and the whole parcel still taken."""
    world, bucket = direct
    lease = await world.lease(ANNA)
    parcel = make_parcel(lease, ANNA)
    header, body = split(parcel)
    flipped = bytes([body[0] ^ 1]) + body[1:]
    for stored, code, times in (
        (flipped, ErrorCode.DIGEST_MISMATCH, 1),
        (body + b"x", ErrorCode.NOT_FOUND, 0),
        (body[:-1], ErrorCode.NOT_FOUND, 0),
        (bytes(2**20), ErrorCode.NOT_FOUND, 0),  # larger than any blob of the run
        (None, ErrorCode.NOT_FOUND, 0),
    ):
        before = bucket.read
        if stored is not None:
            await bucket.blobs.put(stored, digest=lease.lease_id)
        await refused(world, code, "/v1/rollouts", header)
        assert bucket.read - before == times, "nothing of another size is read"
        assert await names(bucket.blobs) == []
    assert await names(world.parts.bundles) == []
    await bucket.blobs.put(flipped, digest=lease.lease_id)  # the service answers the client's PUT with 412
    reply = await world.client(ANNA).upload(parcel)
    assert await world.parts.bundles.get(reply.bundle) == parcel


async def test_no_body_is_read_for_a_bundle_that_would_not_be_stored(direct: tuple[World, Watched]) -> None:
    world, bucket = direct
    await world.join(BEN)
    lease = await world.lease(ANNA, rollouts_max=2)
    parcel = make_parcel(lease, ANNA)
    header, body = split(parcel)
    await bucket.blobs.put(body, digest=lease.lease_id)
    foreign, _ = split(make_parcel(lease, BEN))
    await refused(world, ErrorCode.LEASE_FOREIGN, "/v1/rollouts", foreign)
    await world.client(ANNA).upload(parcel)
    before = bucket.read
    await bucket.blobs.put(body, digest=lease.lease_id)
    await refused(world, ErrorCode.DIGEST_MISMATCH, "/v1/rollouts", header)
    assert bucket.read == before


async def test_no_body_is_read_for_a_worker_whose_rate_is_used_up(tmp_path: Path, s3: S3Server) -> None:
    """Before, a header of a kilobyte could make the coordinator read a whole body from the bucket, any number of times."""
    parts, bucket = await direct_parts(tmp_path, requests_per_second=0.4)
    async with with_anna(parts) as world:
        lease = await world.lease(ANNA)
        parcel = make_parcel(lease, ANNA)
        header, body = split(parcel)
        await bucket.blobs.put(body, digest=lease.lease_id)
        with contextlib.suppress(RemoteError):
            for _ in range(4):
                await world.client(ANNA).heartbeat(HEARTBEAT)
        for _ in range(3):
            await refused(world, ErrorCode.TOO_MANY_REQUESTS, "/v1/rollouts", header)
        assert bucket.read == 0
        assert await bucket.blobs.has(lease.lease_id), "it may come again"


async def test_headers_without_bodies_cost_the_bucket_few_requests_and_their_worker_nothing(
    tmp_path: Path, s3: S3Server
) -> None:
    """Before, each repetition of a recorded header cost two requests to the bucket, at any rate."""
    parts, bucket = await direct_parts(tmp_path, requests_per_second=0.4)
    async with with_anna(parts) as world:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        header, _ = split(parcel)
        began_s, codes = time.monotonic(), list[str]()
        for _ in range(20):
            status, answer = await world.post("/v1/rollouts", header)
            assert status >= 400
            codes.append(answer["code"])
        assert 1 <= bucket.asked <= 5 + 0.4 * (time.monotonic() - began_s), codes
        assert set(codes) == {ErrorCode.NOT_FOUND, ErrorCode.TOO_MANY_REQUESTS}
        reply = await world.client(ANNA).upload(parcel)
        assert await parts.bundles.get(reply.bundle) == parcel


def asked(lease_id: str, body: bytes, *, body_bytes: int = 1) -> UploadUrlRequest:
    return UploadUrlRequest(lease_id=lease_id, body_bytes=body_bytes, body_sha256=hashlib.sha256(body).hexdigest())


async def test_urls_are_signed_for_a_workers_own_open_lease_and_its_size_alone(direct: tuple[World, Watched]) -> None:
    world, _ = direct
    lease = await world.lease(ANNA)
    await world.join(BEN)
    for key, request, code in (
        (ANNA, asked(lease.lease_id, b"x", body_bytes=2**30), ErrorCode.TOO_LARGE),
        (ANNA, asked("0" * 64, b"x"), ErrorCode.LEASE_UNKNOWN),
        (BEN, asked(lease.lease_id, b"x"), ErrorCode.LEASE_UNKNOWN),
        (VALIDATOR, asked(lease.lease_id, b"x"), ErrorCode.UNKNOWN_WORKER),
    ):
        await refused(world, code, "/v1/upload_url", world.signed(request, key))
    assert (await world.post("/v1/upload_url", world.signed(asked(lease.lease_id, b"x"), ANNA)))[0] == 200
    await world.client(ANNA).upload(make_parcel(lease, ANNA))
    await refused(world, ErrorCode.LEASE_UNKNOWN, "/v1/upload_url", world.signed(asked(lease.lease_id, b"x"), ANNA))


async def test_a_gateway_passes_direct_uploads_on(tmp_path: Path, s3: S3Server) -> None:
    parts, bucket = await direct_parts(tmp_path, **LISTENS)
    parts, server = hearing(parts)
    place = f"s3://{BUCKET}/{tmp_path.name}"
    async with running(parts) as writer, contextlib.AsyncExitStack() as stack:
        shared = [await open_blobs(place, parts.run, Path(name)) for name in ("bundles", "blobs")]
        gateway = gateway_parts(parts.run, [server.port], bundles=shared[0], public=shared[1], blobs=place)
        world = World(parts.run, parts, await stack.enter_async_context(serving(gateway)), writer.session)
        for key in (ANNA, TRAINER, VALIDATOR):
            stack.push_async_callback(world.client(key).close)
        world.client(ANNA).direct_bytes_min = 1
        await world.publish()
        await world.join(ANNA)
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        reply = await world.client(ANNA).upload(parcel)
        assert bucket.read == 1
        assert await shared[0].get(reply.bundle) == parcel


async def test_objects_of_leases_that_are_over_are_deleted() -> None:
    for clock, is_over in ((SystemClock(), False), (Later(), True)):
        parts, blobs = memory_parts(make_run()), MemoryBlobs()
        await blobs.put(b"left over", digest="a" * 64)
        async with running(replace(parts, clock=clock, direct=DirectBucket(blobs, ClosedBucket()))) as world:
            if is_over:
                await world.until(partial(is_empty, blobs))
        assert await is_empty(blobs) is is_over


async def is_empty(blobs: Blobs) -> bool:
    return await names(blobs) == []
