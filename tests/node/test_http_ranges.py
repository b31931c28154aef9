"""Pieces over kept connections, from an honest, slow, broken or hostile server: RemoteError or Unreachable within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.time_world import be_slow

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_peer import HttpPeer
from prime_node.adapters.web.http_ranges import HEADER_BYTES_MAX, WAKE_BYTES, RangeClient
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.limits import Limits

PIECE = bytes(range(256)) * 1_024


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Listener:
    """A server of raw bytes that records its requests and counts connections."""

    def __init__(self, answers: tuple[bytes | None, ...], serve: Serve | None) -> None:
        self.asked: list[bytes] = []
        self.heard = asyncio.Semaphore(0)
        """Semaphore that is released once per request."""
        self.tasks: set[asyncio.Task[None]] = set()
        self._answers = list(answers)
        self._serve = serve or self._answer_in_turn

    @property
    def connections(self) -> int:
        return len(self.tasks)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await self._serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer_in_turn(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give the next answer to each request, over all connections. None, and the end of the answers, close the connection."""
        while True:
            self.asked.append(await reader.readuntil(b"\r\n\r\n"))
            self.heard.release()
            if not self._answers:
                await reader.read()
                return
            answer = self._answers.pop(0)
            if answer is None:
                return
            writer.write(answer)
            await writer.drain()


@contextlib.asynccontextmanager
async def listening(
    *answers: bytes | None, serve: Serve | None = None, stall_s: float = 0.2
) -> AsyncIterator[tuple[Listener, RangeClient]]:
    made = Listener(answers, serve)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = RangeClient(url, stall_s=stall_s, connections_max=2)
    async with server:
        try:
            yield made, client
        finally:
            client.close()
            for task in made.tasks:
                task.cancel()
            await asyncio.gather(*made.tasks, return_exceptions=True)


def answer(
    body: bytes = b"", status: str = "206 Partial Content", *, length: int | None = None, more: str = ""
) -> bytes:
    num_bytes = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {num_bytes}\r\n{more}\r\n".encode() + body


async def test_answers_of_any_length_come_over_one_connection() -> None:
    async with listening(answer(PIECE), answer(), answer(b"x")) as (server, client):
        for body in (PIECE, b"", b"x"):
            got = await client.get("/v1/blobs/ab", {"Range": "bytes=0-9"}, bytes_max=len(PIECE))
            assert (got.status, got.body) == (206, body)
        assert server.connections == 1
        assert server.asked[0].startswith(b"GET /v1/blobs/ab HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nRange: bytes=0-9\r\n" in server.asked[0]


async def test_a_connection_is_made_before_it_is_needed_and_used_then() -> None:
    async with listening(answer(PIECE)) as (server, client):
        for _ in range(2):
            await client.prepare()
        await client.get("/v1/blobs/ab", {}, bytes_max=len(PIECE))
        assert server.connections == 1


async def test_a_header_may_come_byte_by_byte() -> None:
    async def byte_by_byte(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for byte in answer(b"piece"):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()

    async with listening(serve=byte_by_byte, stall_s=1.0) as (_, client):
        assert (await client.get("/", {}, bytes_max=5)).body == b"piece"


async def test_a_connection_that_was_closed_while_idle_is_opened_again() -> None:
    async with listening(answer(b"1"), None, answer(b"2")) as (server, client):
        assert (await client.get("/", {}, bytes_max=1)).body == b"1"
        assert (await client.get("/", {}, bytes_max=1)).body == b"2"
        assert server.connections == 2


async def test_a_server_that_wants_to_close_is_not_asked_again_over_that_connection() -> None:
    async with listening(answer(b"1", more="Connection: close\r\n"), answer(b"2")) as (server, client):
        await client.get("/", {}, bytes_max=1)
        await client.get("/", {}, bytes_max=1)
        assert server.connections == 2


@pytest.mark.parametrize("more", ["Connection: close\r\n", "HTTP/1.0"])
async def test_a_connection_that_is_not_kept_is_closed_by_us_where_the_server_does_not(more: str) -> None:
    raw = answer(b"1").replace(b"HTTP/1.1", b"HTTP/1.0") if more == "HTTP/1.0" else answer(b"1", more=more)
    ended = asyncio.Event()

    async def keep_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        ended.set()

    async with listening(serve=keep_open, stall_s=60.0) as (_, client):
        await client.get("/", {}, bytes_max=1)
        await asyncio.wait_for(ended.wait(), 5.0)


async def test_no_more_connections_are_opened_than_are_allowed() -> None:
    async with listening(answer(b"1"), answer(b"2"), answer(b"3")) as (server, client):
        answers = await asyncio.gather(*(client.get("/", {}, bytes_max=1) for _ in range(3)))
        assert sorted(one.body for one in answers) == [b"1", b"2", b"3"]
        assert server.connections == 2


async def test_a_request_that_is_given_up_takes_its_connection_with_it() -> None:
    async with listening(answer(b"half", length=8), answer(b"2")) as (server, client):
        task = asyncio.create_task(client.get("/", {}, bytes_max=8))
        await server.heard.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await client.get("/", {}, bytes_max=8)).body == b"2"
        assert server.connections == 2


REFUSED = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "no status": b"HTTP/1.1 999 Hm\r\nContent-Length: 0\r\n\r\n",
    "an early hint": b"HTTP/1.1 103 Early Hints\r\nContent-Length: 0\r\n\r\n",
    "a header without an end": b"HTTP/1.1 200 OK\r\nX: " + b"a" * HEADER_BYTES_MAX,
    "a line that is no header": b"HTTP/1.1 200 OK\r\nhello\r\nContent-Length: 0\r\n\r\n",
    "a folded header": b"HTTP/1.1 200 OK\r\nX: 1\r\n more: 2\r\nContent-Length: 0\r\n\r\n",
    "no length": b"HTTP/1.1 200 OK\r\n\r\nbody",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
    "a length in other digits": "HTTP/1.1 200 OK\r\nContent-Length: \u00b2\r\n\r\n".encode("latin-1"),
    "chunks": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nzz",
    "compressed": answer(b"\x1f\x8b", more="Content-Encoding: gzip\r\n"),
    "more than it said": answer(b"three", length=2),
}


@pytest.mark.parametrize("raw", REFUSED.values(), ids=REFUSED)
async def test_what_is_no_plain_answer_is_refused(raw: bytes) -> None:
    async with listening(raw) as (_, client):
        with pytest.raises(RemoteError) as refused:
            await client.get("/", {}, bytes_max=100)
        assert refused.value.code is ErrorCode.MALFORMED


async def test_a_longer_body_than_was_asked_for_is_refused_unread() -> None:
    async with listening(answer(length=101), answer(status="404 Not Found", length=2**40)) as (_, client):
        for _ in range(2):
            with pytest.raises(LimitExceeded):
                await client.get("/", {}, bytes_max=100)


async def test_what_comes_unasked_closes_the_connection() -> None:
    async with listening(answer(b"1") + answer(b"stray"), answer(b"2")) as (server, client):
        with contextlib.suppress(RemoteError):  # it may come together with the answer, or after it
            await client.get("/", {}, bytes_max=1)
        assert (await client.get("/", {}, bytes_max=1)).body == b"2"
        assert server.connections == 2


SILENT = {"at once": (), "in the header": (b"HTTP/1.1 200",), "in the body": (answer(b"half", length=8),)}


@pytest.mark.parametrize("answers", SILENT.values(), ids=SILENT)
async def test_a_server_that_falls_silent_is_unreachable(answers: tuple[bytes, ...]) -> None:
    async with listening(*answers) as (_, client):
        with pytest.raises(Unreachable, match="without progress"):
            await client.get("/", {}, bytes_max=8)


async def test_a_body_that_only_drips_is_given_up() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(length=1_000))
        while True:
            writer.write(b"x")
            await writer.drain()
            await be_slow(0.01)

    async with listening(serve=drip, stall_s=0.1) as (_, client):
        with pytest.raises(Unreachable, match="without progress"):
            await asyncio.wait_for(client.get("/", {}, bytes_max=1_000), 5.0)


async def test_a_slow_body_makes_progress_with_less_than_the_bytes_of_a_wake_up() -> None:
    body = PIECE[:1_600]

    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer(length=len(body)))
        for start in range(0, len(body), 100):
            writer.write(body[start : start + 100])
            await writer.drain()
            await be_slow(0.02)
        await reader.read()

    async with listening(serve=slowly, stall_s=0.16) as (_, client):
        assert (await client.get("/", {}, bytes_max=len(body))).body == body


class Wakeups(selectors.DefaultSelector):
    """A selector that counts the sockets that it finds readable."""

    num_readable = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(timeout)
        self.num_readable += sum(bool(events & selectors.EVENT_READ) for _, events in found)
        return found


@pytest.mark.skipif(sys.platform != "linux", reason="other systems wake a process for each packet")
def test_packets_of_a_body_wake_the_process_together() -> None:
    packet_bytes = 1_024
    selector = Wakeups()

    async def fetch() -> None:
        async def in_packets(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer(length=len(PIECE)))
                for start in range(0, len(PIECE), packet_bytes):
                    writer.write(PIECE[start : start + packet_bytes])
                    for _ in range(3):  # turns of the loop, in which the client could read it
                        await asyncio.sleep(0)
            await reader.read()

        async with listening(serve=in_packets, stall_s=5.0) as (_, client):
            for _ in range(2):
                assert (await client.get("/", {}, bytes_max=len(PIECE))).body == PIECE

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        runner.run(fetch())
    assert selector.num_readable < 2 * (len(PIECE) // WAKE_BYTES + 10)


CUT = {"before the answer": b"", "in the header": b"HTTP/1.1 2", "in the body": answer(b"half", length=8)}


@pytest.mark.parametrize("raw", CUT.values(), ids=CUT)
async def test_a_server_that_closes_is_unreachable(raw: bytes) -> None:
    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)

    async with listening(serve=cut) as (_, client):
        with pytest.raises(Unreachable, match=r"broke in the middle|has closed"):
            await client.get("/", {}, bytes_max=8)


async def test_requests_under_way_end_when_the_client_is_closed() -> None:
    async with listening() as (server, client):
        asked = [asyncio.create_task(client.get("/", {}, bytes_max=8)) for _ in range(3)]
        for _ in range(2):
            await server.heard.acquire()
        client.close()
        ends = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(end) for end in ends] == [Unreachable] * 3


async def test_a_peers_refusal_is_reported_with_its_code_and_shows_our_ticket() -> None:
    body = b'{"code": "unavailable", "detail": "no free slot in time", "retry_after_s": 1.5}'
    async with listening(answer(body, "503 Service Unavailable"), answer(status="302 Found")) as (server, client):
        peer = HttpPeer(client.url, run="0" * 64, clock=SystemClock(), bounds=Limits(), authorization=lambda: "ticket")
        with pytest.raises(RemoteError, match="no free slot in time") as refused:
            await peer.blob("0" * 64, start=0, end=8)
        assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.UNAVAILABLE, 1.5)
        assert b"\r\nAuthorization: ticket\r\n" in server.asked[0]
        assert b"\r\nRange: bytes=0-7\r\n" in server.asked[0]
        with pytest.raises(RemoteError, match="redirects"):
            await peer.blob("0" * 64, start=0, end=8)
        await peer.close()


async def test_an_address_without_a_server_is_reported_in_plain_words() -> None:
    client = RangeClient("http://127.0.0.1:1", stall_s=1.0, connections_max=1)
    with pytest.raises(Unreachable, match=r"^http://127\.0\.0\.1:1: Connection refused$"):
        await client.get("/", {}, bytes_max=1)
