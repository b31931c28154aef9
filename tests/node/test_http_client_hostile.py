"""The HTTP client against a server that sends false data, stalls, floods or is not HTTP: RemoteError or Unreachable within its
bounds."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio
from aiohttp import web
from tests.node.http_server import HEARTBEAT, LEASE, RUN, Server, client_of, served
from tests.raw_server_world import raw_server
from tests.time_world import be_slow

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.adapters.web.http_peer import HttpPeer
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.errors import LimitExceeded, RemoteError
from prime_protocol.limits import Limits
from prime_protocol.peers import PeerUpdate
from prime_protocol.replies import NotYet
from prime_protocol.requests import ReceiptsRequest


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    async with served() as server:
        yield server


@pytest_asyncio.fixture
async def client(server: Server) -> AsyncIterator[HttpClient]:
    async with client_of(server, stall_s=0.5) as made:
        yield made


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
        with pytest.raises(RemoteError):
            await call()


async def test_redirects_and_compression_are_not_followed(server: Server, client: HttpClient) -> None:
    server.says(b"", status=302, headers={"Location": "http://127.0.0.1:1/"})
    with pytest.raises(RemoteError, match="redirects"):
        await client.run_spec()
    server.says(b"\x1f\x8b", headers={"Content-Encoding": "gzip"})
    with pytest.raises(RemoteError, match="compressed"):
        await client.run_spec()


@pytest.mark.parametrize("tag", ['"' + "x" * 8_000 + '"', '"\u00e9"', "1", '"a" b'])
async def test_a_tag_that_a_server_may_refuse_is_not_sent_back(server: Server, client: HttpClient, tag: str) -> None:
    """Before, one answer could make all later requests for the head fail, also those to the run's other addresses."""
    sent: list[str | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        sent.append(request.headers.get("If-None-Match"))
        return web.Response(body=RUN.envelope.to_bytes(), headers={"ETag": tag})

    server.answer = answer
    for _ in range(2):
        await client.head()
    assert sent == [None, None]


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


async def test_a_server_killed_during_an_answer_is_reported_as_a_cut_connection(
    server: Server, client: HttpClient
) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Length": "1000"})
        await answer.prepare(request)
        await answer.write(b"x" * 10)
        assert request.transport is not None
        request.transport.abort()
        return answer

    server.answer = cut
    with pytest.raises(Unreachable, match="the connection broke in the middle of an answer"):
        await client.blob("0" * 64)


async def test_a_body_that_drips_for_ever_is_given_up(server: Server, client: HttpClient) -> None:
    async def drip(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        while True:
            await answer.write(b"x")
            await be_slow(0.01)

    server.answer = drip
    with pytest.raises(Unreachable):
        await asyncio.wait_for(client.blob("0" * 64), 5.0)


async def test_a_slow_but_steady_body_is_not_given_up(server: Server, client: HttpClient) -> None:
    async def steady(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        for _ in range(12):  # longer in all than the client waits for a single byte
            await answer.write(b"x" * 4_096)
            await be_slow(0.06)
        return answer

    server.answer = steady
    assert len(await client.blob("0" * 64)) == 12 * 4_096


async def test_a_request_may_be_held_open_as_long_as_was_agreed(server: Server, client: HttpClient) -> None:
    async def hold(request: web.Request) -> web.StreamResponse:
        await be_slow(0.6)
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

    async with (
        raw_server(serve) as port,
        HttpClient(f"http://127.0.0.1:{port}", run=RUN.digest, clock=SystemClock()) as client,
    ):
        with pytest.raises((RemoteError, Unreachable)):
            await client.head()


async def test_an_address_without_a_server_is_unreachable() -> None:
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
        except (Unreachable, RemoteError) as error:
            outcomes.append(isinstance(error, RemoteError))
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


async def test_an_address_without_a_server_is_reported_in_plain_words() -> None:
    with socket.socket() as nobody:  # bound, and not listening
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
        async with HttpClient(f"http://127.0.0.1:{port}", run="0" * 64, clock=SystemClock()) as client:
            with pytest.raises(Unreachable, match=rf"^http://127\.0\.0\.1:{port}: Connection refused$"):
                await client.head()


async def test_a_peer_whose_news_end_in_silence_is_unreachable(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PEER_SILENCE_S_MAX", 0.05)
    over = asyncio.Event()

    async def one_line(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        await stream.prepare(request)
        await stream.write(PeerUpdate(cursor=1, head=2).model_dump_json().encode() + b"\n")
        await over.wait()
        return stream

    server.answer = one_line
    peer = HttpPeer(server.url, run=RUN.digest, clock=SystemClock(), bounds=Limits(), authorization=lambda: None)
    updates = peer.updates()
    assert (await anext(updates)).head == 2
    with pytest.raises(Unreachable):
        await asyncio.wait_for(anext(updates), 5.0)
    over.set()
    await peer.close()
