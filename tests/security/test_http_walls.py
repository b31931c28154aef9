"""Framing, connections, requests and readers of the HTTP server, attacked over raw sockets. Nothing here is timed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, World, make_run, memory_parts, running, running_with_anna
from tests.node.swarm_world import swarm
from tests.security.raw_http import Raw, ask, barrier, get, post
from tests.time_world import be_slow

from prime_node.adapters.web import guarded_handler
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.connection_counts import DEBT_S_MAX, ConnectionCounts
from prime_node.adapters.web.shares import Turns
from prime_node.coordinator.api.callers import caller_bounds_of
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.web import CallerBounds, Request, Response, Route, Sender
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

LARGE = bytes(2**24)
MEMBER = Sender(ANNA.key_id, is_role=False)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with running_with_anna() as world:
        yield world


async def large(request: Request) -> Response:
    return Response(LARGE, content_type="application/octet-stream")


@pytest.fixture
async def peer() -> AsyncIterator[str]:
    """A server as peers run it: each connection begins with plain_gets.py."""
    server = AiohttpServer()
    routes = [Route("GET", "/v1/blobs/{digest}", large, is_bulk=True), Route("GET", "/v1/run", large)]
    yield f"http://127.0.0.1:{await server.start(routes, host='127.0.0.1', port=0)}"
    await server.stop(grace_s=0.1)


# Framing

CHUNKED = b"POST /v1/join HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
REFUSED = {
    "one-byte chunks": CHUNKED + b"1\r\nx\r\n" * 50_000,
    "a transfer coding in any case": CHUNKED.replace(b"Transfer-Encoding", b"tRANSFER-eNCODING"),
    "a transfer coding beside a length": CHUNKED.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"),
    "an expectation": get("/healthz", "Expect: x"),
    "an upgrade": get("/healthz", "Upgrade: websocket", "Connection: upgrade"),
    "two lengths": get("/healthz", "Content-Length: 0", "Content-Length: 0"),
    "two hosts": get("/healthz", "Host: 127.0.0.1"),
    "no host": b"GET /healthz HTTP/1.1\r\n\r\n",
    "a length that is none": get("/healthz", "Content-Length: +1"),
    "a folded field": get("/healthz", "X: 1", " 2"),
    "a space before the colon": get("/healthz", "X : 1"),
    "a field without a colon": get("/healthz", "rubbish"),
    "a null": get("/healthz", "X: \x00"),
    "bare line feeds": b"GET /healthz HTTP/1.1\nHost: x\n\n",
    "a header too long": get("/healthz", "X: " + "x" * limits.HTTP_HEADER_BYTES_MAX),
    "a header that does not end": b"GET /healthz HTTP/1.1\r\nX: " + b"x" * limits.HTTP_HEADER_BYTES_MAX,
    "too many fields": get("/healthz", *["X: 1"] * limits.HTTP_HEADER_LINES_MAX),
    "TLS": b"\x16\x03\x01\x00\xa5\x01\x00",
    "another version": b"GET /healthz HTTP/2.0\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_a_request_that_is_not_framed_plainly_gets_an_error_body_and_no_parser(world: World, data: bytes) -> None:
    raw = await Raw.to(world.url)
    await raw.send(data)
    answer = await raw.answer()
    assert answer.code == ErrorCode.MALFORMED
    assert answer.headers["connection"] == "close"
    raw.close()
    await world.client(ANNA).heartbeat(HEARTBEAT)


@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED)
async def test_a_peer_refuses_the_same(peer: str, data: bytes) -> None:
    raw = await Raw.to(peer)
    await raw.send(data)
    assert (await raw.answer()).code == ErrorCode.MALFORMED
    raw.close()


@pytest.mark.parametrize(
    "line", ["CONNECT x:1", "OPTIONS *", "DELETE /v1/run", "GET /nothing", "POST /healthz", "PUT /v1/join"]
)
async def test_what_no_endpoint_answers_is_not_found(world: World, line: str) -> None:
    answer = await ask(world.url, f"{line} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert answer.code == ErrorCode.NOT_FOUND


async def test_the_body_of_an_unknown_path_is_not_read(world: World) -> None:
    raw = await Raw.to(world.url)
    await raw.send(post("/v1/nothing", 2**40))
    answer = await raw.answer()
    assert (answer.code, answer.headers["connection"]) == (ErrorCode.NOT_FOUND, "close")
    raw.close()


async def test_a_header_that_drips_is_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HTTP_HEADER_S_MAX", 0.1)
    raw = await Raw.to(world.url)
    await raw.send(b"GET /healthz HTTP/1.1\r\n")
    assert await raw.is_cut()
    raw.close()


@pytest.mark.parametrize("begun", [b"", post("/v1/join", 1_000)], ids=["header", "body"])
async def test_what_comes_in_single_bytes_is_cut(world: World, begun: bytes) -> None:
    """A separate read of one byte costs the server as much as a kilobyte."""
    raw = await Raw.to(world.url)
    await raw.send(begun)

    async def drip() -> None:
        for byte in post("/v1/join", 1_000, "X: " + "x" * 2 * limits.HTTP_READINGS_MAX):
            await raw.send(bytes([byte]))
            await barrier(world.url)

    with pytest.raises(ConnectionError):
        await drip()
    raw.close()


async def test_pipelined_requests_are_read_one_after_the_other(world: World) -> None:
    raw = await Raw.to(world.url)
    await raw.send(get("/healthz") * 100)
    for _ in range(100):
        assert (await raw.answer()).status == 200
    raw.close()


async def test_what_is_sent_ahead_stays_in_the_network(world: World) -> None:
    """While one request is in progress nothing is buffered for the next ones: TCP stops the sender."""
    tag = (await ask(world.url, get("/v1/head"))).headers["etag"]
    raw = await Raw.to(world.url)
    await raw.send(get("/v1/head", f"If-None-Match: {tag}", "Prefer: wait=30"))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await raw.send(get("/healthz") * 1_000_000)
    raw.close()


# Readers


async def test_a_reader_that_stands_still_is_cut_and_holds_no_memory(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guarded_handler, "READER_S", 0.1)
    raw = await Raw.to(peer)
    raw.stand_still()
    await raw.send(get("/v1/run"))

    async def send_slowly() -> None:
        while True:
            await raw.send(b"x")
            await be_slow(0.01)

    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_slowly(), 20)
    raw.close()


async def test_large_answers_to_strangers_are_bounded_together(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "STRANGERS_ANSWER_BYTES_EACH_MAX", len(LARGE))
    raw = await Raw.to(peer)
    raw.stand_still()
    await raw.send(get("/v1/run"))
    for _ in range(500):
        refused = await Raw.to(peer)
        await refused.send(get("/v1/run"))
        head = await refused.line()
        refused.close()
        if head.startswith(b"HTTP/1.1 503"):
            break
    else:
        raise AssertionError("it was never refused")
    raw.close()


# Connections and requests


async def test_one_network_of_strangers_has_so_many_connections_and_a_member_does_not_count(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.client(ANNA).heartbeat(HEARTBEAT)
    monkeypatch.setattr(limits, "HTTP_STRANGERS_EACH_MAX", 3)
    found = [raw for _ in range(8) if (raw := await opened(world.url)) is not None]
    num_open = 0
    for raw in found:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):  # a later one has replaced it
            await raw.send(get("/healthz"))
            num_open += (await raw.answer()).status == 200
    assert 0 < num_open <= 3
    await world.client(ANNA).heartbeat(HEARTBEAT)
    for raw in found:
        raw.close()


async def test_connections_beyond_the_rate_are_reset_and_those_that_are_there_stay() -> None:
    async with running(memory_parts(make_run(), connects_per_second=1.0)) as world:
        await world.join(ANNA)
        raws = []
        while raw := await opened(world.url):
            raws.append(raw)
        assert len(raws) < 100
        await world.client(ANNA).heartbeat(HEARTBEAT)
        for raw in raws:
            raw.close()


async def opened(url: str) -> Raw | None:
    """Return a connection that gets an answer; None if it is reset."""
    try:
        raw = await Raw.to(url)
        await raw.send(get("/healthz"))
        assert (await raw.answer()).status == 200
    except (ConnectionError, asyncio.IncompleteReadError):
        return None
    return raw


def bounds(**settings: object) -> CallerBounds:
    return caller_bounds_of(CoordinatorConfig.model_validate(settings))


def test_requests_of_one_network_wait_and_those_of_others_and_of_members_do_not() -> None:
    now_s = 1_000.0
    connection_counts = ConnectionCounts(bounds(public_requests_per_second=4.0), lambda: now_s)
    one, same, other = (connection_counts.enter(address) for address in ("8.8.8.8", "8.8.8.9", "9.9.9.9"))
    assert one is not None
    assert same is not None
    assert other is not None
    assert [connection_counts.delay_s(one, ""), connection_counts.delay_s(same, "")] == [0.0, 0.25]
    assert connection_counts.delay_s(other, "") == 0.0
    one.vouch(MEMBER)
    assert [connection_counts.delay_s(one, "") for _ in range(100)] == [0.0] * 100
    one.vouch(None)
    assert connection_counts.delay_s(one, "") > 0.25


def test_a_flood_of_strangers_is_over_soon_after_its_end() -> None:
    now_s = 1_000.0
    connection_counts = ConnectionCounts(bounds(public_requests_per_second=1e9), lambda: now_s)
    entry = connection_counts.enter("9.9.9.9")
    assert entry is not None
    refused = 0
    for _ in range(10_000):
        try:
            assert connection_counts.delay_s(entry, "") <= DEBT_S_MAX
        except RemoteError:
            refused += 1
    assert refused > 9_000
    now_s += DEBT_S_MAX + 1.0
    assert connection_counts.delay_s(entry, "") == 0.0


def test_a_proxy_is_not_one_stranger() -> None:
    connection_counts = ConnectionCounts(
        bounds(public_requests_per_second=4.0, proxies=["10.0.0.1"], connects_per_second=1.0), lambda: 1_000.0
    )
    entries = [connection_counts.enter("10.0.0.1") for _ in range(limits.HTTP_STRANGERS_EACH_MAX + 1)]
    entry = entries[-1]
    assert entry is not None
    entry.vouch(MEMBER)  # of one of the many that it speaks for
    assert [connection_counts.delay_s(entry, "8.8.8.8"), connection_counts.delay_s(entry, "8.8.8.9")] == [0.0, 0.25]
    assert connection_counts.delay_s(entry, "9.9.9.9") == 0.0
    assert connection_counts.num_strangers == 0


def test_a_machine_of_the_operators_own_is_a_network_of_its_own() -> None:
    caller_bounds = bounds()
    assert caller_bounds.network_of("192.168.0.7", "") != caller_bounds.network_of("192.168.0.8", "")
    assert caller_bounds.network_of("8.8.8.8", "") == caller_bounds.network_of("8.8.8.9", "")
    assert caller_bounds.network_of("2001:4860:4860::1", "") == caller_bounds.network_of("2001:4860:4860:ffff::1", "")


def test_what_is_counted_is_given_back_once() -> None:
    connection_counts = ConnectionCounts(bounds(connects_per_second=1_000.0), lambda: 0.0)
    entries = [connection_counts.enter("8.8.8.8") for _ in range(limits.HTTP_STRANGERS_EACH_MAX)]
    assert connection_counts.enter("8.8.8.8") is None
    for entry in entries[:2]:
        assert entry is not None
        entry.vouch(MEMBER)
        entry.leave()
        entry.leave()
        entry.vouch(None)
    assert (connection_counts.num_connections, connection_counts.num_strangers) == (len(entries) - 2,) * 2
    assert connection_counts.enter("8.8.8.8") is not None


def test_turns_are_remembered_for_a_bounded_number_of_networks() -> None:
    turns = Turns(per_second=1.0, burst=1.0)
    for number in range(70_000):
        turns.take(str(number), 0.0)
    assert len(turns.levels) == 65_536


# The name under which it is asked for


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.0.0.1:8400",
        "[::1]:8400",
        "localhost:8400",
        "LOCALHOST",
        "coordinator:8400",
        "box.local",
        "a.internal",
    ],
)
async def test_a_private_caller_may_use_a_name_that_cannot_be_registered(world: World, host: str) -> None:
    assert (await ask(world.url, get("/v1/status", host=host))).status == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8400",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "a@127.0.0.1",
        "rl.example.org",
    ],
)
async def test_a_page_that_rebinds_its_name_to_a_coordinator_reads_nothing(world: World, host: str) -> None:
    for path in ("/v1/status", "/healthz", "/metrics", "/v1/run"):
        answer = await ask(world.url, get(path, host=host))
        assert answer.code == ErrorCode.MALFORMED
        assert b"coordinator.hosts" in answer.body
        assert ANNA.key_id.encode() not in answer.body


async def test_a_page_that_rebinds_its_name_to_a_peer_reads_nothing(tmp_path: Path) -> None:
    """Before, it read a contributor's key and run, and the weights of a run that its peers alone can reach."""
    async with swarm(tmp_path, BEN) as made:
        signed = await made.publish()
        [(follower, peer)] = made.workers
        await follower.wait_newer(-1)
        url = f"http://127.0.0.1:{peer.port}"
        paths = [f"/v1/blobs/{blob.digest}" for blob in signed.manifest.blobs[:2]]
        for path in ("/v1/run", "/v1/head", *paths):
            assert (await ask(url, get(path))).status == 200
        for path in ("/v1/run", "/v1/head", "/v1/identity", *paths):
            for host in ("evil.example", f"evil.example:{peer.port}"):
                assert (await ask(url, get(path, f"Prime-Nonce: {'0' * 32}", host=host))).code == ErrorCode.MALFORMED


async def test_a_peer_s_owner_lists_other_names(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        _, peer = await made.worker(BEN, hosts=("Seeds.Example.org",))
        url = f"http://127.0.0.1:{peer.port}"
        assert (await ask(url, get("/v1/run", host="seeds.example.org:8400"))).status == 200
        assert (await ask(url, get("/v1/run", host="evil.example"))).code == ErrorCode.MALFORMED


async def test_the_operator_lists_other_names() -> None:
    async with running(memory_parts(make_run(), hosts=("rl.example.org",))) as world:
        assert json.loads((await ask(world.url, get("/healthz", host="RL.example.org:8400"))).body)["ok"]
        assert (await ask(world.url, get("/healthz", host="evil.example"))).code == ErrorCode.MALFORMED


def test_a_public_caller_and_a_proxy_may_use_any_name() -> None:
    caller_bounds = bounds(proxies=["10.0.0.1"])
    assert caller_bounds.is_host("8.8.8.8", "rl.example.org")
    assert caller_bounds.is_host("10.0.0.1", "rl.example.org")
    assert not caller_bounds.is_host("10.0.0.2", "rl.example.org")
