"""An upload of a lease that went through its gateway is one message to the writer, and judged as any other."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    ROOT,
    VALIDATOR,
    World,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.gateway_world import LISTENS, gateway_parts, hearing, serving
from tests.security.raw_http import ask, claim, post

from prime_lab.memory_blobs import MemoryBlobs
from prime_node.adapters.link.link_client import LinkClient
from prime_node.coordinator.api.direct_uploads import lease_bytes_max
from prime_node.coordinator.gateway import known_leases
from prime_node.coordinator.gateway.known_leases import LEASE_BYTES_MAX, KnownLeases
from prime_node.ports.web import Response
from prime_node.ports.writer_link import ADMIT, ForwardedAnswer, ForwardedCall
from prime_protocol import limits
from prime_protocol.assignment import Lease
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replies import UploadReply
from prime_protocol.requests import AdminRequest
from prime_protocol.rollout import RolloutHeader

UPLOAD = "/v1/rollouts"
CLAIM = seal(b"{}", PayloadType.BODY_CLAIM, ANNA)


class Bundles(MemoryBlobs):
    """A bucket whose service may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = 0
        """Attempts to store something that will fail."""
        self.stored: list[str] = []

    async def put(self, data: bytes, *, digest: str | None = None) -> str:
        """Store bytes, unless the service fails."""
        if self.failing:
            self.failing -= 1
            raise OSError("the service is down")
        self.stored.append(await super().put(data, digest=digest))
        return self.stored[-1]


@dataclass
class Place:
    """A writer and two gateways with one bucket, and what the gateways have asked."""

    writer: World
    one: World
    other: World
    bundles: Bundles
    calls: list[ForwardedCall]

    @property
    def uploads(self) -> list[str]:
        """Paths of the calls for uploads."""
        return [call.path for call in self.calls if call.path in (ADMIT, UPLOAD)]

    async def leased(self) -> Lease:
        """Return a lease of ANNA's that went through gateway `one`."""
        self.one.head = self.writer.head = self.other.head = self.writer.head or await self.writer.publish()
        lease = await self.one.lease(ANNA)
        self.calls.clear()
        self.bundles.stored.clear()
        return lease


@pytest.fixture
async def place(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    calls, plain = list[ForwardedCall](), LinkClient.ask

    async def noted(link: LinkClient, call: ForwardedCall) -> ForwardedAnswer:
        calls.append(call)
        return await plain(link, call)

    monkeypatch.setattr(LinkClient, "ask", noted)
    run, bundles = make_run(), Bundles()
    parts, server = hearing(replace(memory_parts(run, **LISTENS), bundles=bundles))
    async with running(parts, ANNA, BEN) as world, contextlib.AsyncExitStack() as stack:
        worlds = []
        for _ in range(2):
            url = await stack.enter_async_context(serving(gateway_parts(run, [server.port], bundles=bundles)))
            worlds.append(World(run, parts, url, world.session))
            await worlds[-1].learn_epoch()
            for key in (ANNA, BEN):
                stack.push_async_callback(worlds[-1].client(key).close)
        one, other = worlds
        yield Place(world, one, other, bundles, calls)


async def test_an_upload_is_one_message_to_the_writer_and_is_charged_there(place: Place) -> None:
    parcel = make_parcel(await place.leased(), ANNA)
    reply = await place.one.client(ANNA).upload(parcel)
    assert reply.bundle == digest_of(parcel)
    assert reply.verdict is None
    assert place.uploads == [UPLOAD]
    (call,) = place.calls
    assert call.parcel is not None
    assert call.parcel.is_stored
    assert call.claimant == "", "the writer would take its rate for charged"
    assert place.bundles.stored == [reply.bundle], "the writer asked for it"
    assert await place.one.client(ANNA).upload(parcel) == reply
    assert place.uploads == [UPLOAD, ADMIT, UPLOAD], "a lease lets in one body"
    assert (await place.writer.take_task(VALIDATOR)).bundle == reply.bundle


async def test_a_worker_that_uploads_elsewhere_is_asked_for(place: Place) -> None:
    await place.other.client(ANNA).heartbeat(HEARTBEAT)  # its client learns the epoch
    parcel = make_parcel(await place.leased(), ANNA)
    assert (await place.other.client(ANNA).upload(parcel)).bundle == digest_of(parcel)
    assert place.uploads == [ADMIT, UPLOAD]
    assert place.calls[-1].claimant == ANNA.key_id


async def test_an_announcement_that_a_gateway_has_let_in_lets_nothing_in_again(place: Place) -> None:
    parcel = make_parcel(await place.leased(), ANNA)
    line = await claim(place.one, ANNA, parcel)
    sent = post(UPLOAD, len(parcel), line) + parcel
    assert (await ask(place.one.url, sent)).status == 200
    place.calls.clear()
    assert (await ask(place.one.url, sent)).code == ErrorCode.REPLAYED
    assert place.uploads == []
    again = await ask(place.other.url, sent)  # the writer is asked, and knows the bundle
    assert again.status == 200
    assert (await ask(place.other.url, sent)).code == ErrorCode.REPLAYED


async def test_a_bundle_for_another_lease_is_stored_once_the_writer_takes_it(place: Place) -> None:
    parcel = make_parcel(await place.leased(), ANNA)
    unknown = make_parcel(await place.writer.lease(BEN), BEN, lease_id="f" * 64)
    line = await claim(place.one, ANNA, unknown)
    answer = await ask(
        place.one.url, post(UPLOAD, len(unknown), line) + unknown
    )  # let in for ANNA's lease, signed by BEN
    assert answer.code == ErrorCode.LEASE_UNKNOWN
    assert place.bundles.stored == []
    assert (await place.one.client(ANNA).upload(parcel)).bundle == digest_of(parcel)


async def test_a_banned_worker_gets_no_bundle_in(place: Place) -> None:
    parcel = make_parcel(await place.leased(), ANNA)
    await place.writer.client(ROOT).admin(AdminRequest(action="ban", worker=ANNA.key_id))
    with pytest.raises(RemoteError) as error:
        await place.one.client(ANNA).upload(parcel)
    assert error.value.code is ErrorCode.BANNED


async def test_a_bundle_that_cannot_be_stored_at_first_is_stored_when_the_writer_asks(place: Place) -> None:
    parcel = make_parcel(await place.leased(), ANNA)
    place.bundles.failing = 1
    assert (await place.one.client(ANNA).upload(parcel)).bundle == digest_of(parcel)
    assert place.bundles.stored == [digest_of(parcel)]


async def test_a_bundle_that_the_writer_does_not_take_is_stored_once_until_it_takes_another(place: Place) -> None:
    client = place.one.client(ANNA)
    for is_stored in (True, False):
        wrong = make_parcel(await place.leased(), ANNA, policy_digest="f" * 64)
        with pytest.raises(RemoteError) as error:
            await client.upload(wrong)
        assert error.value.code is ErrorCode.WRONG_TYPE
        assert place.bundles.stored == [digest_of(wrong)] * is_stored
    right = make_parcel(await place.leased(), ANNA)
    await client.upload(right)
    assert place.uploads == [UPLOAD], "its body was let in, and the writer asked for the bundle"
    assert place.calls[-1].parcel is not None
    assert not place.calls[-1].parcel.is_stored
    await client.upload(make_parcel(await place.leased(), ANNA))
    assert place.calls[-1].parcel is not None
    assert place.calls[-1].parcel.is_stored


async def test_a_bundle_that_is_longer_than_its_lease_allows_is_not_stored(place: Place) -> None:
    lease = await place.leased()
    bound = lease_bytes_max(len(lease.groups), place.one.run)
    with pytest.raises(RemoteError) as error:
        await place.one.client(ANNA).upload(make_parcel(lease, ANNA, body=bytes(bound + 1)))
    assert error.value.code is ErrorCode.TOO_LARGE
    assert place.bundles.stored == []


def granted(number: int, num_bytes: int = 1) -> tuple[Response, str]:
    payload = b'{"groups": [1], "lease_id": "%d%s"}' % (number, b" " * num_bytes)
    envelope = seal(payload, PayloadType.LEASE, BEN)
    return Response(envelope.to_bytes()), envelope.digest


def test_a_lease_lets_in_one_body_that_its_worker_has_announced_just_now() -> None:
    leases, now_ms, late_ms = KnownLeases(make_run()), 10**12, round(1_000 * limits.REQUEST_AGE_S_MAX) + 1
    assert not leases.admits(CLAIM, now_ms, now_ms)
    leases.add(ANNA.key_id, granted(1)[0])
    assert not leases.admits(seal(b"{}", PayloadType.BODY_CLAIM, BEN), now_ms, now_ms)
    for ahead_ms in (-late_ms, late_ms):
        assert not leases.admits(CLAIM, now_ms + ahead_ms, now_ms)
    assert not leases.has_admitted(CLAIM)
    assert leases.admits(CLAIM, now_ms, now_ms)
    assert leases.has_admitted(CLAIM)
    assert not leases.admits(seal(b"[]", PayloadType.BODY_CLAIM, ANNA), now_ms, now_ms)
    with pytest.raises(RemoteError) as error:
        leases.admits(CLAIM, now_ms, now_ms)
    assert error.value.code is ErrorCode.REPLAYED


def test_only_answers_with_a_short_lease_are_remembered_and_the_newest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_leases, "REMEMBERED", 2)
    leases = KnownLeases(make_run())
    for answer in (Response(b"{}", status=202), granted(1, LEASE_BYTES_MAX)[0]):
        leases.add(ANNA.key_id, answer)
        assert not leases.admits(CLAIM, 1, 1)
    stored = []
    for number in range(3):
        answer, digest = granted(number)
        leases.add(ANNA.key_id, answer)
        stored.append(header(digest))
    taken = Response(UploadReply(bundle="a" * 64).model_dump_json().encode())
    for one, is_known in zip(stored, [False, True, True], strict=True):
        assert not leases.may_store(BEN.key_id, one)
        assert leases.may_store(ANNA.key_id, one) is is_known
        assert not leases.may_store(ANNA.key_id, one)
        leases.note(ANNA.key_id, taken)


def header(lease_digest: str) -> RolloutHeader:
    return RolloutHeader.model_construct(body_bytes=1, lease_digest=lease_digest)  # type: ignore[call-arg]
