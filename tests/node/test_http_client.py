"""The HTTP client against a real server on loopback: honest, broken and hostile."""

from __future__ import annotations

import asyncio
import email.utils
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from aiohttp import web
from tests.node.table_engine import table_weights
from tests.node.worker_world import WORKER, MemorySource, make_run

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.limits import Limits
from prime_protocol.messages import (
    AdminRequest,
    BatchRequest,
    BlobHeader,
    BundleRequest,
    HeartbeatReply,
    HeartbeatRequest,
    LeaseRequest,
    LeaveRequest,
    NotYet,
    ReceiptsRequest,
    Stamped,
    UploadReply,
    WorkerState,
)
from prime_protocol.parcel import open_parcel

RUN = make_run()
HEARTBEAT = HeartbeatRequest(state=WorkerState.IDLE, policy_version=0, bundles_spooled=0)
LEASE = LeaseRequest(policy_version=0, policy_digest="0" * 64, rollouts_max=8)

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """One handler for every path; a test sets it."""

    def __init__(self) -> None:
        self.answer: Answer
        self.seen: list[tuple[str, str, bytes]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.seen.append((request.method, request.path, await request.read()))
        return await self.answer(request)

    def says(self, body: bytes | str, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        async def answer(request: web.Request) -> web.StreamResponse:
            return web.Response(body=body, status=status, headers=headers)

        self.answer = answer


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    served = Server()
    application = web.Application(client_max_size=2**28)
    application.router.add_route("*", "/{path:.*}", served.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    await runner.cleanup()


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[HttpClient]:
    async with HttpClient(server.url, run=RUN.digest, clock=SystemClock(), key=WORKER, stall_s=0.5) as made:
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
    with pytest.raises(PeerError) as caught:
        await client.blob("0" * 64, start=2, end=12)
    assert caught.value.code is ErrorCode.BAD_RANGE


async def test_a_bundle_must_have_the_digest_that_was_asked_for(server: Server, client: HttpClient) -> None:
    server.says(b"bundle")
    assert await client.bundle(BundleRequest(bundle=digest_of(b"bundle"))) == b"bundle"
    with pytest.raises(PeerError) as caught:
        await client.bundle(BundleRequest(bundle=digest_of(b"other")))
    assert caught.value.code is ErrorCode.DIGEST_MISMATCH


@pytest.mark.parametrize("code", ErrorCode)
async def test_every_error_comes_through_with_its_code(server: Server, client: HttpClient, code: ErrorCode) -> None:
    server.says(error_body(code, retry_after_s=1.5), status=PeerError(code, "").http_status)
    with pytest.raises(PeerError) as caught:
        await client.heartbeat(HEARTBEAT)
    assert caught.value.code is code
    assert caught.value.detail.startswith("because")
    assert caught.value.retry_after_s == 1.5


async def test_a_wrong_clock_is_explained_by_how_much(server: Server, client: HttpClient) -> None:
    date = email.utils.formatdate(SystemClock().now_ms() / 1_000 + 3_600, usegmt=True)
    server.says(error_body("expired"), status=401, headers={"Date": date})
    with pytest.raises(PeerError, match=r"3(599|600|601) s behind the coordinator's"):
        await client.heartbeat(HEARTBEAT)


@pytest.mark.parametrize("status", [400, 403, 404, 500, 502, 503])
async def test_a_proxys_page_is_no_refusal_of_the_coordinator(server: Server, client: HttpClient, status: int) -> None:
    server.says(b"<html>" + b"x" * 100_000, status=status)
    with pytest.raises(PeerError) as caught:
        await client.upload(b"parcel")
    assert caught.value.is_transient


async def test_a_captive_portals_page_is_no_receipt(server: Server, client: HttpClient) -> None:
    server.says(b"<html>Welcome to the hotel</html>")
    with pytest.raises(PeerError) as caught:
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
    with pytest.raises(PeerError) as caught:
        await client.blob("0" * 64)
    assert caught.value.code is code


NONSENSE = {
    "empty": b"",
    "not JSON": b"\xff\xfe",
    "a number": b"7",
    "null": b"null",
    "unknown field": b'{"step": 1, "head": 1, "more": 1}',
    "wrong type": b'{"step": "1", "head": 1}',
    "duplicate key": b'{"step": 1, "step": 2, "head": 1}',
    "NaN": b'{"step": NaN, "head": 1}',
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("body", NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_is_a_peer_error(server: Server, client: HttpClient, body: bytes) -> None:
    server.says(body)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: client.heartbeat(HEARTBEAT),
        lambda: client.lease(LEASE),
        lambda: client.receipts(ReceiptsRequest()),
        lambda: client.manifest(0),
        client.run_spec,
    ]
    for call in calls:
        with pytest.raises(PeerError):
            await call()


async def test_redirects_and_compression_are_not_followed(server: Server, client: HttpClient) -> None:
    server.says(b"", status=302, headers={"Location": "http://127.0.0.1:1/"})
    with pytest.raises(PeerError, match="redirects"):
        await client.run_spec()
    server.says(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    with pytest.raises(PeerError, match="compresses"):
        await client.run_spec()


async def test_an_endless_body_is_cut_at_the_bound(server: Server, client: HttpClient) -> None:
    sent = 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x" * 65_536)
            sent += 65_536

    server.answer = endless
    with pytest.raises(LimitExceeded):
        await client.run_spec()
    with pytest.raises(LimitExceeded):
        await client.blob("0" * 64, start=0, end=1_000)
    await asyncio.sleep(0)
    assert sent < 64 * 2**20


async def test_a_declared_length_beyond_the_bound_is_refused_unread(server: Server, client: HttpClient) -> None:
    server.says(b"x" * (limits.ENVELOPE_BYTES_MAX + 1))
    with pytest.raises(LimitExceeded):
        await client.manifest(0)
    client.bounds = Limits(blob_bytes_max=1_024)
    with pytest.raises(LimitExceeded):
        await client.blob("0" * 64)


async def test_a_server_that_never_answers_is_unreachable(server: Server, client: HttpClient) -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        raise AssertionError

    server.answer = never
    with pytest.raises(Unreachable):
        await client.head()


async def test_a_body_that_stops_in_the_middle_is_unreachable(server: Server, client: HttpClient) -> None:
    async def stall(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "1000"})
        await answer.prepare(request)
        await answer.write(b"x" * 10)
        await asyncio.Event().wait()
        return answer

    server.answer = stall
    with pytest.raises(Unreachable):
        await client.blob("0" * 64)


async def test_a_body_that_drips_for_ever_is_given_up(server: Server, client: HttpClient) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x")
            await asyncio.sleep(0.01)

    server.answer = drip
    with pytest.raises(Unreachable):
        await asyncio.wait_for(client.blob("0" * 64), 5.0)


async def test_a_slow_but_steady_body_is_not_given_up(server: Server, client: HttpClient) -> None:
    async def steady(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(12):  # longer in all than the client waits for a single byte
            await answer.write(b"x" * 4_096)
            await asyncio.sleep(0.06)
        return answer

    server.answer = steady
    assert len(await client.blob("0" * 64)) == 12 * 4_096


async def test_a_request_may_be_held_open_as_long_as_was_agreed(server: Server, client: HttpClient) -> None:
    async def hold(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return web.Response(body=NotYet(reason="nothing", retry_after_s=0.0).model_dump_json(), status=202)

    server.answer = hold
    assert isinstance(await client.lease(LEASE.model_copy(update={"wait_s": 1.0})), NotYet)
    with pytest.raises(Unreachable):
        await client.lease(LEASE)


RAW_ANSWERS = {
    "closes at once": b"",
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
    "truncated head": b"HTTP/1.1 200 OK\r\nContent-",
    "truncated body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "huge header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "bad status": b"HTTP/1.1 999999 Hm\r\n\r\n",
}


@pytest.mark.parametrize("raw", RAW_ANSWERS.values(), ids=RAW_ANSWERS)
async def test_what_is_no_http_is_no_traceback(raw: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, HttpClient(f"http://127.0.0.1:{port}", run=RUN.digest, clock=SystemClock()) as client:
        with pytest.raises((PeerError, Unreachable)):
            await client.head()


async def test_nobody_there_is_unreachable() -> None:
    async with HttpClient("http://127.0.0.1:1", run=RUN.digest, clock=SystemClock()) as client:
        with pytest.raises(Unreachable):
            await client.head()


async def test_a_broken_connection_is_opened_again(server: Server, client: HttpClient) -> None:
    calls = 0

    async def every_second(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        if calls % 2 and request.transport is not None:
            request.transport.abort()
        return web.Response(status=204)

    server.answer = every_second
    outcomes = []
    for _ in range(4):
        try:
            outcomes.append(await client.upload(b"x") is not None)
        except (Unreachable, PeerError) as error:
            outcomes.append(isinstance(error, PeerError))
    assert outcomes == [False, True, False, True]


async def test_a_link_that_is_closed_with_requests_under_way_is_unreachable(server: Server, client: HttpClient) -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def stalls_in_the_body(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"Content-Length": "8"})
        await stream.prepare(request)
        await stream.write(b"half")
        begun.set()
        await over.wait()
        return stream

    server.answer = stalls_in_the_body
    asked = asyncio.create_task(client.blob("0" * 64))
    await begun.wait()
    waiting = asyncio.create_task(client.blob("1" * 64))
    await asyncio.sleep(0)
    await client.close()
    for task in (asked, waiting):
        with pytest.raises(Unreachable):
            await task
    over.set()
