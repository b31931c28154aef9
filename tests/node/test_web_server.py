"""The web server against slow, silent and greedy peers, over raw sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.time_world import turns

from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.ports.web import Request, Response, Route
from prime_protocol import limits
from prime_protocol.errors import LocalError


async def echo(request: Request) -> Response:
    return Response(request.body, content_type="application/octet-stream")


async def stream(request: Request) -> Response:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"abc"

    return Response(chunks(), content_type="application/octet-stream", headers={"Content-Length": "9"})


ROUTES = [
    Route("GET", "/stream", stream),
    Route("POST", "/echo", echo, 1_000),
    Route("GET", "/bulk", stream, is_bulk=True),  # so each connection begins with plain_gets.py
    Route("POST", "/upload", echo, limits.REQUEST_BYTES_MAX + 1),
]


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = AiohttpServer(header_s_max=0.2, body_grace_s=0.2)
    yield await server.start(ROUTES, host="127.0.0.1", port=0)
    await server.stop(grace_s=0.1)


async def exchange(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send pieces until the server closes, which it must do soon; return all received bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(reader.read())
    for piece in pieces:
        if not answer.done():
            writer.write(piece)
            await asyncio.wait([answer], timeout=pause_s)
    try:
        return await asyncio.wait_for(answer, 5)
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


async def test_a_silent_connection_is_closed(port: int) -> None:
    assert await exchange(port) == b""


async def test_a_header_that_does_not_end_is_cut_off(port: int) -> None:
    assert await exchange(port, b"POST /echo HT", b"TP/1.1\r\nHost: x\r\n", pause_s=0.05) == b""


async def test_an_idle_connection_is_closed_after_its_answer(port: int) -> None:
    answer = await exchange(port, b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert answer.endswith(b"abcabcabc")


async def test_a_body_that_stalls_is_refused(port: int) -> None:
    answer = await exchange(port, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"too slowly" in answer


@pytest.mark.slow
async def test_a_body_that_drips_is_refused_although_it_never_stalls(port: int) -> None:
    pieces = [b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n", *[b"x"] * 20]
    assert b"too slowly" in await exchange(port, *pieces, pause_s=0.02)


@pytest.mark.slow
async def test_a_large_body_that_stalls_is_refused_although_it_came_fast_before() -> None:
    server = AiohttpServer(body_grace_s=60.0, body_stall_s_max=0.2)
    port = await server.start(ROUTES, host="127.0.0.1", port=0)
    head = b"POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 500000\r\n\r\n"
    assert b"too slowly" in await exchange(port, head + b"x" * 400_000)
    await server.stop(grace_s=0.1)


async def test_a_client_that_hangs_up_in_its_body_leaves_no_traceback(
    port: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
    await writer.drain()
    await turns()
    writer.transport.abort()
    await turns()
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]


NO_HTTP = (
    b"\x16\x03\x01\x00\xa5\r\n\r\n",
    b"GET /stream HTTP/1.1\r\nHost: x\r\nb\x00d: 1\r\n\r\n",
    b"GET /stream HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"GET /stream HTTP/9\r\n\r\n",
    b"GET /stream HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
)


@pytest.mark.parametrize("raw", NO_HTTP)
async def test_what_is_no_http_is_refused_and_leaves_no_traceback(
    raw: bytes, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    answer = await exchange(port, raw)
    assert answer.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400"))
    assert b'"malformed"' in answer
    assert not [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")]


async def test_an_announced_length_over_the_limit_is_refused_before_it_is_sent(port: int) -> None:
    answer = await exchange(port, b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")


async def test_a_compressed_body_is_not_unpacked(port: int) -> None:
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc"
    assert (await exchange(port, head)).startswith(b"HTTP/1.1 400")


async def test_head_has_the_header_of_get_and_no_body(port: int) -> None:
    answer = await exchange(port, b"HEAD /stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert b"Content-Length: 9" in answer
    assert answer.endswith(b"\r\n\r\n")


async def test_a_wrong_method_and_an_unknown_path_are_not_found(port: int) -> None:
    for line in (b"GET /echo", b"GET /nothing", b"DELETE /stream"):
        answer = await exchange(port, line + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 404")
        assert b'"code": "not_found"' in answer


async def test_a_port_in_use_is_a_local_error(port: int) -> None:
    with pytest.raises(LocalError, match="choose another port"):
        await AiohttpServer().start(ROUTES, host="127.0.0.1", port=port)
