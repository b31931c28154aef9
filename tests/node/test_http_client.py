"""The HTTP client against a real server on loopback: honest, broken and hostile."""

from __future__ import annotations

import contextlib
import email.utils
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from aiohttp import ClientOSError, web
from tests.node.http_server import HEARTBEAT, LEASE, RUN, Server, client_of, served
from tests.node.table_engine import table_weights
from tests.node.worker_world import WORKER, MemorySource

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_answers import reason_of
from prime_node.adapters.web.http_client import HttpClient
from prime_node.ports.transport import Unreachable
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.parcel import open_parcel
from prime_protocol.replies import HeartbeatReply, NotYet, UploadReply
from prime_protocol.requests import (
    AdminRequest,
    BatchRequest,
    BlobHeader,
    BundleRequest,
    LeaveRequest,
    Stamped,
)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as server:
        yield server


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[HttpClient]:
    async with client_of(server) as made:
        yield made


def error_body(code: str, **more: object) -> bytes:
    return json.dumps({"code": code, "detail": "because", **more}).encode()


async def test_a_request_is_signed_stamped_and_never_the_same_twice(server: Server, client: HttpClient) -> None:
    server.says(HeartbeatReply(step=3, head=2).model_dump_json())
    assert (await client.heartbeat(HEARTBEAT)).step == 3
    await client.heartbeat(HEARTBEAT)
    stamps = []
    for method, path, body in server.seen:
        assert (method, path) == ("POST", "/v1/heartbeat")
        payload = open_envelope(body).verify(PayloadType.REQUEST, trusted=[WORKER.key_id])
        stamps.append(parse_json(payload, Stamped))
    assert stamps[0].run == RUN.digest
    assert stamps[0].request == HEARTBEAT
    assert stamps[0].nonce != stamps[1].nonce
    assert abs(stamps[0].issued_at_ms - SystemClock().now_ms()) < 10_000


async def test_each_action_has_its_own_address(server: Server, client: HttpClient) -> None:
    server.says(b"{}")
    await client.leave(LeaveRequest())
    await client.admin(AdminRequest(action="ban", worker=WORKER.key_id))
    assert [path for _, path, _ in server.seen] == ["/v1/leave", "/v1/admin"]


async def test_202_means_not_yet(server: Server, client: HttpClient) -> None:
    server.says(NotYet(reason="the trainer is busy", retry_after_s=2.0).model_dump_json(), status=202)
    reply = await client.lease(LEASE)
    assert isinstance(reply, NotYet)
    assert reply.reason == "the trainer is busy"
    assert isinstance(await client.batch(BatchRequest(step=0, durable_step=0)), NotYet)


async def test_uploads_arrive_whole(server: Server, client: HttpClient) -> None:
    parcel = bytes(range(256)) * 4_000
    server.says(UploadReply(bundle=digest_of(parcel)).model_dump_json())
    assert (await client.upload(parcel)).bundle == digest_of(parcel)
    assert server.seen == [("POST", "/v1/rollouts", parcel)]


async def test_a_blob_is_uploaded_as_a_signed_parcel(server: Server, client: HttpClient) -> None:
    server.says(b"{}")
    assert await client.put_blob(b"part") == digest_of(b"part")
    parcel = open_parcel(server.seen[0][2], body_bytes_max=100)
    header = parse_json(parcel.envelope.verify(PayloadType.BLOB, trusted=[WORKER.key_id]), BlobHeader)
    assert bytes(parcel.check_body(header)) == b"part"
    assert header.run == RUN.digest


async def test_manifests_and_runs_come_as_envelopes(server: Server, client: HttpClient) -> None:
    source = MemorySource(RUN)
    signed = source.publish(table_weights(0))
    server.says(signed.envelope.to_bytes())
    assert await client.manifest(0) == signed.envelope
    await client.publish(signed.envelope)
    assert [path for _, path, _ in server.seen] == ["/v1/manifests/0", "/v1/manifests"]
    server.says(RUN.envelope.to_bytes())
    assert await client.run_spec() == RUN.envelope


async def test_there_is_no_head_before_the_first(server: Server, client: HttpClient) -> None:
    server.says(b"", status=204)
    assert await client.head() is None


async def test_an_unchanged_head_costs_no_body(server: Server, client: HttpClient) -> None:
    head = MemorySource(RUN).publish(table_weights(0)).envelope
    bodies = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal bodies
        if request.headers.get("If-None-Match") == '"1"':
            return web.Response(status=304, headers={"ETag": '"1"'})
        bodies += 1
        return web.Response(body=head.to_bytes(), headers={"ETag": '"1"'})

    server.answer = answer
    assert [await client.head() for _ in range(3)] == [head] * 3
    assert bodies == 1


async def test_ranges_of_a_blob(server: Server, client: HttpClient) -> None:
    data = bytes(range(200))

    async def answer(request: web.Request) -> web.StreamResponse:
        part = request.http_range
        if part.start is None:
            return web.Response(body=data)
        return web.Response(body=data[part.start : part.stop], status=206)

    server.answer = answer
    assert await client.blob(digest_of(data)) == data
    assert await client.blob(digest_of(data), start=10, end=20) == data[10:20]
    assert await client.blob(digest_of(data), start=190) == data[190:]
    assert await client.blob(digest_of(data), start=0, end=0) == b""


async def test_a_server_that_ignores_ranges_is_found_out(server: Server, client: HttpClient) -> None:
    server.says(b"0123456789")
    with pytest.raises(RemoteError) as caught:
        await client.blob("0" * 64, start=2, end=12)
    assert caught.value.code is ErrorCode.BAD_RANGE


async def test_a_bundle_must_have_the_digest_that_was_asked_for(server: Server, client: HttpClient) -> None:
    server.says(b"bundle")
    assert await client.bundle(BundleRequest(bundle=digest_of(b"bundle"))) == b"bundle"
    with pytest.raises(RemoteError) as caught:
        await client.bundle(BundleRequest(bundle=digest_of(b"other")))
    assert caught.value.code is ErrorCode.DIGEST_MISMATCH


@pytest.mark.parametrize("code", ErrorCode)
async def test_every_error_comes_through_with_its_code(server: Server, client: HttpClient, code: ErrorCode) -> None:
    server.says(error_body(code, retry_after_s=1.5), status=RemoteError(code, "").http_status)
    with pytest.raises(RemoteError) as caught:
        await client.heartbeat(HEARTBEAT)
    assert caught.value.code is code
    assert caught.value.detail.startswith("because")
    assert caught.value.retry_after_s == 1.5


async def test_a_wrong_clock_is_explained_by_how_much(server: Server, client: HttpClient) -> None:
    date = email.utils.formatdate(SystemClock().now_ms() / 1_000 + 3_600, usegmt=True)
    server.says(error_body("expired"), status=401, headers={"Date": date})
    with pytest.raises(RemoteError, match=r"3(599|600|601) s behind the coordinator's"):
        await client.heartbeat(HEARTBEAT)


@pytest.mark.parametrize("status", [400, 403, 404, 500, 502, 503])
async def test_a_proxys_page_is_no_refusal_of_the_coordinator(server: Server, client: HttpClient, status: int) -> None:
    server.says(b"<html>" + b"x" * 100_000, status=status)
    with pytest.raises(RemoteError) as caught:
        await client.upload(b"parcel")
    assert caught.value.is_transient


async def test_a_captive_portals_page_is_no_receipt(server: Server, client: HttpClient) -> None:
    server.says(b"<html>Welcome to the hotel</html>")
    with pytest.raises(RemoteError) as caught:
        await client.upload(b"parcel")
    assert caught.value.is_transient


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (404, ErrorCode.NOT_FOUND),
        (416, ErrorCode.BAD_RANGE),
        (500, ErrorCode.UNAVAILABLE),
        (429, ErrorCode.TOO_MANY_REQUESTS),
    ],
)
async def test_a_plain_mirror_is_understood_by_its_status(
    server: Server, client: HttpClient, status: int, code: ErrorCode
) -> None:
    server.says(b"nope", status=status)
    with pytest.raises(RemoteError) as caught:
        await client.blob("0" * 64)
    assert caught.value.code is code


def test_a_link_that_ends_during_a_request_is_reported_in_words() -> None:
    broken = ClientOSError(None, "Can not write request body for http://127.0.0.1:8400/v1/receipts")
    assert reason_of(broken) == "the connection was closed during a transfer"


class RecordedPauses(SystemClock):
    """Clock that records pauses and takes none."""

    def __init__(self) -> None:
        self.taken_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.taken_s.append(seconds)


async def test_a_client_that_is_refused_for_load_asks_the_next_address_after_a_pause() -> None:
    """Before, it asked all addresses at once, behind which may be the same busy coordinator."""
    clock = RecordedPauses()
    async with (
        served() as busy,
        served() as other,
        HttpClient(busy.url, run=RUN.digest, clock=clock, key=WORKER) as client,
    ):
        client.also_at([other.url])
        for server in (busy, other):
            server.says(error_body("unavailable", retry_after_s=3.0), status=503)
        with pytest.raises(RemoteError, match="because"):
            await client.heartbeat(HEARTBEAT)
        assert (len(busy.seen), len(other.seen)) == (1, 1)
        assert [3.0 <= pause_s <= 4.5 for pause_s in clock.taken_s] == [True]
        other.says(HeartbeatReply(step=3, head=2).model_dump_json())
        for _ in range(2):  # then it stays there
            assert (await client.heartbeat(HEARTBEAT)).step == 3
        assert (len(busy.seen), len(other.seen), len(clock.taken_s)) == (2, 3, 2)


async def test_a_client_asks_the_next_address_at_once_if_one_does_not_answer() -> None:
    clock = RecordedPauses()
    async with served() as gone:
        pass
    async with served() as other, HttpClient(gone.url, run=RUN.digest, clock=clock, key=WORKER) as client:
        client.also_at([other.url])
        other.says(HeartbeatReply(step=3, head=2).model_dump_json())
        assert (await client.heartbeat(HEARTBEAT)).step == 3
    assert clock.taken_s == []


async def test_a_client_of_a_link_with_tls_asks_no_further_address_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before, a client whose server failed sent its invitation and bodies in clear, where the RunSpec named such an address."""
    async with served() as gone:
        pass
    async with served() as other, served() as further:
        for url in (gone.url.replace("http:", "https:"), gone.url.replace("http:", "HTTPS:")):
            async with HttpClient(url, run=RUN.digest, clock=RecordedPauses(), key=WORKER) as client:
                caplog.clear()
                client.also_at([other.url, further.url.replace("http:", "https:")])
                other.says(HeartbeatReply(step=3, head=2).model_dump_json())
                for _ in range(3):
                    with pytest.raises(Unreachable):
                        await client.heartbeat(HEARTBEAT)
                assert client.url.lower().startswith("https:")
            (line,) = [record.getMessage() for record in caplog.records if "over TLS" in record.getMessage()]
            assert line.startswith(other.url)
    assert other.seen == []


async def test_clients_whose_server_fails_spread_over_all_others() -> None:
    """Before, each client asked the addresses in the order of the RunSpec, so that all of them came to the same next one."""
    async with contextlib.AsyncExitStack() as stack:
        async with served() as gone:
            pass
        others = [await stack.enter_async_context(served()) for _ in range(3)]
        urls = [other.url for other in others]
        for other in others:
            other.says(HeartbeatReply(step=3, head=2).model_dump_json())

        async def answered_by(key: SigningKey, listed: list[str]) -> str:
            async with HttpClient(gone.url, run=RUN.digest, clock=RecordedPauses(), key=key) as client:
                client.also_at(listed)
                await client.heartbeat(HEARTBEAT)
                return client.url

        keys = [SigningKey(bytes([number]) * 32) for number in range(1, 25)]
        first = [await answered_by(key, urls) for key in keys]
        assert set(first) == set(urls)
        assert [await answered_by(key, urls[::-1]) for key in keys] == first, (
            "a key's order does not depend on the list's"
        )
