"""Plain GETs of a bulk route, over raw sockets: answered in order, with everything else left to the framework."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.time_world import turns

from prime_node.adapters.web import connection_counts
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.ports.web import Request, Response, Route
from prime_protocol.errors import ErrorCode, RemoteError

LARGE = bytes(2**24)


class Blobs:
    """A bulk route that records its requests and the end of each answer."""

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.given_back = asyncio.Semaphore(0)
        self.cancelled = asyncio.Event()

    async def __call__(self, request: Request) -> Response:
        self.asked.append(request)
        name = request.params["name"]
        if name == "never":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if name == "refused":
            raise RemoteError(ErrorCode.UNAVAILABLE, "no slot", retry_after_s=2.0)
        if name == "fault":
            raise ZeroDivisionError
        body: bytes | AsyncIterator[bytes] = name.encode()
        headers = {"Content-Range": "bytes 0-4/9", "Content-Length": str(len(name))}
        if name in ("stream", "broken"):
            body, headers["Content-Length"] = self._chunks(name), "6"
        if name == "large":
            body, headers["Content-Length"] = LARGE, str(len(LARGE))
        return Response(body, 206, "application/octet-stream", headers, after=self.given_back.release)

    async def _chunks(self, name: str) -> AsyncIterator[bytes]:
        yield b"abc"
        if name == "broken":
            raise RemoteError(ErrorCode.NOT_FOUND, "it has just been removed")
        yield b"def"


async def plain(request: Request) -> Response:
    return Response(b"by the framework")


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


@pytest.fixture
async def port(blobs: Blobs) -> AsyncIterator[int]:
    server = AiohttpServer(header_s_max=0.4)
    routes = [Route("GET", "/blobs/{name}", blobs, is_bulk=True), Route("GET", "/plain", plain)]
    yield await server.start(routes, host="127.0.0.1", port=0)
    await server.stop(grace_s=0.1)


class Line:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def answer(self) -> tuple[bytes, bytes]:
        """Read the header and a body of the declared length."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return head, await self.reader.readexactly(int(length.split(b":")[1]))

    async def ask(self, path: str, more: str = "") -> tuple[bytes, bytes]:
        self.writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
        return await self.answer()


@pytest.fixture
async def line(port: int) -> AsyncIterator[Line]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield Line(reader, writer)
    writer.close()


async def test_plain_requests_are_answered_one_after_the_other(line: Line, blobs: Blobs) -> None:
    for name in ("a", "stream", "b"):
        head, body = await line.ask(f"/blobs/{name}", "Range: bytes=0-4\r\nAuthorization: ticket \r\n")
        assert head.startswith(b"HTTP/1.1 206 Partial Content\r\n")
        assert body == (b"abcdef" if name == "stream" else name.encode())
        await blobs.given_back.acquire()
    assert dict(blobs.asked[0].headers) == {"range": "bytes=0-4", "authorization": "ticket", "host": "x"}
    assert blobs.asked[0].remote == "127.0.0.1"


async def test_a_refusal_has_its_code_and_the_connection_stays(line: Line) -> None:
    head, body = await line.ask("/blobs/refused")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"Retry-After: 2\r\n" in head
    assert b'"unavailable"' in body
    assert (await line.ask("/blobs/a"))[1] == b"a"


FRAMEWORKS = {
    "another route": b"GET /plain HTTP/1.1\r\nHost: x\r\n\r\n",
    "a path with an escape": b"GET /blobs/%61 HTTP/1.1\r\nHost: x\r\n\r\n",
    "a query": b"GET /blobs/a?b HTTP/1.1\r\nHost: x\r\n\r\n",
    "an absolute target": b"GET http://x/blobs/a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a HEAD": b"HEAD /blobs/a HTTP/1.1\r\nHost: x\r\n\r\n",
    "a body": b"GET /blobs/a HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    "a wish about the connection": b"GET /blobs/a HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n",
    "an old version": b"GET /blobs/a HTTP/1.0\r\nHost: x\r\n\r\n",
    "a header of other bytes": b"GET /blobs/a HTTP/1.1\r\nHost: x\r\nX: \xff\r\n\r\n",
}
REFUSED = {
    "a bare line feed": b"GET /blobs/a HTTP/1.1\nHost: x\n\n",
    "a folded header": b"GET /blobs/a HTTP/1.1\r\nHost: x\r\nX: 1\r\n 2\r\n\r\n",
    "an upgrade": b"GET /blobs/a HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\n\r\n",
}


@pytest.mark.parametrize("request_", FRAMEWORKS.values(), ids=FRAMEWORKS)
async def test_whatever_is_not_plain_is_the_frameworks(line: Line, request_: bytes) -> None:
    assert (await line.ask("/blobs/a"))[1] == b"a"
    line.writer.write(request_)
    head = await line.reader.readuntil(b"\r\n\r\n")
    assert b"\r\nServer: Python/" in head


@pytest.mark.parametrize("request_", REFUSED.values(), ids=REFUSED)
async def test_what_two_parsers_might_read_differently_is_refused(line: Line, request_: bytes) -> None:
    assert (await line.ask("/blobs/a"))[1] == b"a"
    line.writer.write(request_)
    head, body = await line.answer()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b'"malformed"' in body


async def test_a_request_in_two_packets_is_the_frameworks_with_all_that_follow(line: Line, blobs: Blobs) -> None:
    line.writer.write(b"GET /blobs/a HTTP/1.1\r\nHo")
    await turns()
    line.writer.write(b"st: x\r\n\r\n")
    assert (await line.answer())[1] == b"a"
    head, body = await line.ask("/blobs/b")
    assert b"\r\nServer: Python/" in head
    assert body == b"b"


async def test_a_request_that_comes_early_waits_for_the_answer_before(line: Line) -> None:
    line.writer.write(b"GET /blobs/large HTTP/1.1\r\nHost: x\r\n\r\n")
    await turns()
    line.writer.write(b"GET /blobs/a HTTP/1.1\r\nHost: x\r\n\r\n")
    assert len((await line.answer())[1]) == len(LARGE)
    assert (await line.answer())[1] == b"a"


async def test_a_client_that_disconnects_cancels_its_answer(line: Line, blobs: Blobs) -> None:
    line.writer.write(b"GET /blobs/never HTTP/1.1\r\nHost: x\r\n\r\n")
    await turns()
    line.writer.transport.abort()
    await asyncio.wait_for(blobs.cancelled.wait(), 5.0)


async def test_a_client_that_disconnects_during_an_answer_frees_its_slot(line: Line, blobs: Blobs) -> None:
    line.writer.write(b"GET /blobs/large HTTP/1.1\r\nHost: x\r\n\r\n")
    await line.reader.readuntil(b"\r\n\r\n")
    line.writer.transport.abort()
    await asyncio.wait_for(blobs.given_back.acquire(), 5.0)


async def test_a_client_that_does_not_read_is_disconnected(
    line: Line, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_counts, "BODY_GRACE_S", -len(LARGE))
    line.writer.write(b"GET /blobs/large HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.wait_for(blobs.given_back.acquire(), 5.0)


async def test_an_idle_connection_is_closed(line: Line) -> None:
    await line.ask("/blobs/a")
    assert await asyncio.wait_for(line.reader.read(), 5.0) == b""


async def test_a_body_that_breaks_off_does_not_look_whole(line: Line) -> None:
    line.writer.write(b"GET /blobs/broken HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await line.answer()


async def test_a_fault_of_ours_is_logged_and_closes_the_connection(
    line: Line, caplog: pytest.LogCaptureFixture
) -> None:
    line.writer.write(b"GET /blobs/fault HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
        await line.answer()
    assert "ZeroDivisionError" in caplog.text


async def test_an_answer_under_way_ends_before_the_server_does(blobs: Blobs) -> None:
    server = AiohttpServer()
    port = await server.start([Route("GET", "/blobs/{name}", blobs, is_bulk=True)], host="127.0.0.1", port=0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    line = Line(reader, writer)
    writer.write(b"GET /blobs/large HTTP/1.1\r\nHost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    stopping = asyncio.create_task(server.stop(grace_s=5.0))
    assert len(await line.reader.readexactly(len(LARGE))) == len(LARGE)
    await stopping
    writer.close()
