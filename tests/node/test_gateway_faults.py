"""Faults between gateways and the coordinator: slow links, callers that leave, storage that fails or is another one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field, replace

import pytest
from blake3 import blake3
from tests.cases_world import check_each
from tests.node.coordinator_world import ANNA, HEARTBEAT, World, make_parcel, make_run, memory_parts, running
from tests.node.gateway_world import LISTENS, SECRET, gateway_parts, hearing, serving, two_gateways
from tests.node.link_world import RUN, answering, linked, no_answer, raw_gateway

from prime_lab.memory_blobs import MemoryBlobs
from prime_lab.virtual_loop import run_virtually
from prime_lab.virtual_tcp import VirtualTcp
from prime_node.adapters.link import link_server
from prime_node.adapters.link.link_client import LinkClient
from prime_node.adapters.link.link_server import LinkServer
from prime_node.adapters.link.sealed_frames import (
    BrokenLink,
    FrameKind,
    FrameOpener,
    FrameSealer,
    LinkFrame,
)
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.shedding import PRESSURE_MAX
from prime_node.coordinator.api.blobs import BlobReader
from prime_node.coordinator.api.callers import Callers
from prime_node.coordinator.api.peer_discovery import announced_from
from prime_node.coordinator.gateway.config import GatewayConfig
from prime_node.coordinator.gateway.relay import GatewayRelay
from prime_node.ports.web import Request, Response, Sender
from prime_node.ports.writer_link import ForwardedAnswer, ForwardedCall, HeldParcel, fault_of
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.requests import PeersRequest


async def test_the_writer_says_that_it_is_alive_while_a_long_frame_of_the_gateway_arrives() -> None:
    """Before, it answered the gateway's own signs of life, which wait behind the body: a body of 3 s ended the link."""
    async with answering(no_answer) as port, raw_gateway(port) as gateway:
        gateway.send(gateway.sealer.seal(LinkFrame(FrameKind.CALL, 1, {"path": "/x"}, bytes(100)))[:50])
        assert (await anext(gateway.frames())).kind is FrameKind.ALIVE


async def test_large_answers_wait_for_a_slow_link_instead_of_ending_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "UNSENT_BYTES_MAX", 2**24)
    piece, num_calls, asked = bytes(2**20), 32, asyncio.Queue[None]()

    async def stream() -> AsyncIterator[bytes]:
        yield piece

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        asked.put_nowait(None)
        return ForwardedAnswer(Response(stream() if call.body else piece))

    async with answering(answer) as port, raw_gateway(port) as gateway:
        for number in range(num_calls):
            gateway.send(gateway.sealer.seal(LinkFrame(FrameKind.CALL, number, {"path": "/x"}, b"x" * (number % 2))))
            await asked.get()  # nothing is read meanwhile
        num_bytes = 0
        async for frame in gateway.frames():
            num_bytes += len(frame.body)
            if num_bytes == num_calls * len(piece):
                return
    pytest.fail("the writer has ended the link")


async def test_a_call_that_waits_for_nothing_is_answered_before_one_that_came_first_and_waits() -> None:
    def answer(call: ForwardedCall) -> ForwardedAnswer | Awaitable[ForwardedAnswer]:
        match call.path:
            case "/waits":
                return no_answer(call)
            case "/fails":
                raise ZeroDivisionError
            case "/refused":
                raise RemoteError(ErrorCode.BANNED, "no")
        return ForwardedAnswer(Response(call.path.encode()))

    paths, found = ("/waits", "/one", "/fails", "/refused", "/two"), list[tuple[int, bytes | str]]()
    async with answering(answer) as port, raw_gateway(port) as gateway:
        gateway.send(
            gateway.sealer.seal(*(LinkFrame(FrameKind.CALL, n, {"path": path}) for n, path in enumerate(paths)))
        )
        async for frame in gateway.frames():
            if frame.kind is not FrameKind.ALIVE:
                found.append((frame.call, frame.head.get("code", frame.body)))
            if len(found) == len(paths):
                break
    assert found == [(1, b"/one"), (2, "internal"), (3, "banned"), (4, b"/two"), (0, b"")]


async def test_a_stream_whose_reader_leaves_before_it_begins_is_ended() -> None:
    asked, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def stream() -> AsyncIterator[bytes]:
        while True:
            yield b"x"

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        asked.set()
        await go_on.wait()
        return ForwardedAnswer(Response(stream(), after=ended.set))

    async with answering(answer) as port, linked(port) as link:
        asking = asyncio.ensure_future(link.ask(ForwardedCall("/v1/live")))
        await asked.wait()
        asking.cancel()
        await asyncio.wait({asking})
        go_on.set()
        async with asyncio.timeout(10.0):
            await ended.wait()


async def test_a_stream_whose_gateway_leaves_before_it_begins_is_ended() -> None:
    """Before, it waited without end for room that only that gateway could make."""
    begun, may_answer, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"piece"

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        begun.set()
        await may_answer.wait()
        return ForwardedAnswer(Response(pieces(), after=ended.set))

    async with answering(answer) as port:
        async with raw_gateway(port) as gateway:
            gateway.send(gateway.sealer.seal(LinkFrame(FrameKind.CALL, 1, {"path": "/x"})))
            await begun.wait()
        async with raw_gateway(port) as gateway:
            assert (await anext(gateway.frames())).kind is FrameKind.ALIVE
        may_answer.set()
        await asyncio.wait_for(ended.wait(), 10.0)


async def test_a_parcel_whose_sender_has_left_is_not_waited_for() -> None:
    asked, go_on, failed = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        asked.set()
        await go_on.wait()
        assert call.parcel is not None
        try:
            await call.parcel.fetch()
        except RemoteError as error:
            failed.set_result(error.code)
            raise
        return ForwardedAnswer(Response())

    async def fetch() -> bytes:
        return b"x"

    async with answering(answer) as port, linked(port) as link:
        parcel = HeldParcel("b" * 64, 1, bytes(64), fetch)
        asking = asyncio.ensure_future(link.ask(ForwardedCall("/v1/rollouts", parcel=parcel)))
        await asked.wait()
        asking.cancel()
        await asyncio.wait({asking})
        go_on.set()
        async with asyncio.timeout(10.0):
            assert await failed is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize("error", [OSError(errno.EIO, "the service is down"), RuntimeError("a bug")])
async def test_a_parcel_that_cannot_be_given_is_not_waited_for(error: Exception) -> None:
    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        assert call.parcel is not None
        await call.parcel.fetch()
        return ForwardedAnswer(Response())

    async def fetch() -> bytes:
        raise error

    async with answering(answer) as port, linked(port) as link, asyncio.timeout(10.0):
        with pytest.raises(RemoteError) as failed:
            await link.ask(ForwardedCall("/v1/rollouts", parcel=HeldParcel("b" * 64, 1, bytes(64), fetch)))
    assert failed.value.code is ErrorCode.UNAVAILABLE


@dataclass(frozen=True)
class SteadyHost:
    """A machine that is never stopped."""

    may_act: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.mark.parametrize("turns", range(8))
def test_a_gateway_that_is_to_end_when_its_link_has_just_broken_ends(turns: int) -> None:
    """Before, a cancellation was forgotten while the tasks of a broken link ended, and the gateway linked itself again."""

    tcp = VirtualTcp(turns)

    async def main() -> None:
        gateway, writer, server = SteadyHost(), SteadyHost(), LinkServer()
        gateway.may_act.set()
        writer.may_act.set()
        tcp.place("gateway", gateway)
        tcp.listen(1, writer, server.link_factory(no_answer, SECRET, RUN, None))
        link = LinkClient((("gateway", 1),), secret=SECRET, run=RUN)
        keeping = asyncio.create_task(link.keep())
        await link.linked.wait()
        tcp.end(gateway, is_silent=False)
        for _ in range(turns):
            await asyncio.sleep(0)
        keeping.cancel()
        done, _ = await asyncio.wait({keeping}, timeout=60.0)
        assert done

    run_virtually(main(), tcp)


def frame_bytes(head: bytes, body: bytes, *, kind: int = FrameKind.CALL, cut: int = 0) -> bytes:
    """Return a frame that claims `cut` more bytes than it has."""
    lengths = len(head).to_bytes(4, "big") + (len(body) + cut).to_bytes(4, "big")
    return bytes((kind,)) + (7).to_bytes(8, "big") + lengths + head + body


def opened(frames: bytes) -> list[LinkFrame]:
    """Return the frames of a first packet whose codes are right."""
    length = (16 + len(frames)).to_bytes(4, "big")
    codes = blake3(bytes(8) + length, key=SECRET).digest(8) + blake3(bytes(8) + frames, key=SECRET).digest(16)
    return [*FrameOpener(SECRET).feed(length + codes + frames)]


def test_frames_of_one_packet_are_read_one_by_one_and_none_of_them_may_be_malformed() -> None:
    good, empty = frame_bytes(b'{"path":"/x"}', b"ab"), frame_bytes(b"", b"", kind=FrameKind.ALIVE)
    frames = opened(good + empty + good)
    assert frames[0] == frames[2] == LinkFrame(FrameKind.CALL, 7, {"path": "/x"}, b"ab")
    assert frames[1] == LinkFrame(FrameKind.ALIVE, 7)
    sealed = FrameSealer(SECRET).seal(*frames)
    assert [*FrameOpener(SECRET).feed(sealed)] == frames
    assert sealed[28:] == good + empty + good
    deep = b"[" * 100_000
    bad = {
        "a body that is cut off": frame_bytes(b"{}", b"ab", cut=1),
        "a head that is cut off": frame_bytes(b"{}", b"", cut=2**32 - 1),
        "a frame that is cut off": good[:16],
        "an unknown kind": frame_bytes(b"", b"", kind=99),
        "no JSON": frame_bytes(b"{]", b""),
        "no UTF-8": frame_bytes(b"\xff", b""),
        "no object": frame_bytes(b"[]", b""),
        "a head that is nested too deeply": frame_bytes(deep, b""),
    }

    def ends_the_link(frame: bytes) -> None:
        with pytest.raises(BrokenLink):
            opened(good + frame)

    check_each(bad.items(), ends_the_link)


def test_a_newer_coordinator_ends_no_gateway_by_a_word_that_it_does_not_know() -> None:
    """Coordinators are upgraded first."""
    fault = LinkFrame(FrameKind.FAULT, 1, {"code": "of_tomorrow", "detail": "x"})
    assert fault_of(fault.head).code is ErrorCode.INTERNAL
    sealed = FrameSealer(SECRET).seal(LinkFrame(99, 1))  # type: ignore[arg-type]
    with pytest.raises(BrokenLink, match="99"):
        list(FrameOpener(SECRET).feed(sealed))


def test_an_address_that_no_resolver_takes_is_a_bad_setting() -> None:
    with pytest.raises(LocalError, match="no name of a host"):
        GatewayConfig.load({"gateway": {"writers": ["a..b:8402"]}})


class FailingBlobs(MemoryBlobs):
    """Blobs of a service that is down."""

    async def size(self, digest: str) -> int:
        """Fail."""
        raise OSError(errno.EIO, "the service is down")


async def test_a_gateway_whose_bucket_fails_asks_its_caller_to_try_again() -> None:
    run = make_run()
    link = LinkClient((), secret=SECRET, run=run.digest)
    blobs = BlobReader(run, FailingBlobs(), serve_chunks=True)
    relay = GatewayRelay(run, link, Callers(proxies=(), trusted=()), SystemClock(), blobs)
    handler = next(route.handler for route in relay.routes() if route.path == "/v1/blobs/{digest}")
    with pytest.raises(RemoteError) as error:
        await handler(Request(params={"digest": RUN}, body=b"", headers={}, remote="127.0.0.1"))
    assert (error.value.code, error.value.retry_after_s) == (ErrorCode.UNAVAILABLE, 5.0)


async def test_a_bundle_that_a_gateway_stored_elsewhere_is_not_taken() -> None:
    """The worker would delete it, and no validator could read it."""
    run = make_run()
    parts, server = hearing(memory_parts(run, **LISTENS))
    async with running(parts, ANNA) as world, serving(gateway_parts(run, [server.port], bundles=MemoryBlobs())) as url:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        client = World(run, parts, url, world.session).client(ANNA)
        async with client:
            with pytest.raises(RemoteError, match="elsewhere"):
                await client.upload(parcel)
        assert (await world.client(ANNA).upload(parcel)).verdict is None


async def test_a_member_stays_one_to_its_gateway_while_there_is_no_writer() -> None:
    async with two_gateways() as (_, (one, _)):
        relay = GatewayRelay(
            one.run, LinkClient((), secret=SECRET, run=RUN), Callers(proxies=(), trusted=()), SystemClock()
        )
        handler = next(route.handler for route in relay.routes() if route.path == "/v1/heartbeat")
        vouched: list[Sender | None] = []
        body = one.signed(HEARTBEAT, ANNA)
        with pytest.raises(RemoteError) as error:
            await handler(Request(params={}, body=body, headers={}, remote="127.0.0.1", vouch=vouched.append))
        assert error.value.code is ErrorCode.UNAVAILABLE
        assert vouched == []


async def test_an_address_behind_a_proxy_that_the_settings_do_not_name_is_not_announced_through_a_gateway() -> None:
    """The coordinator would dial the proxy."""
    announced = []

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        request = Request(params={}, body=call.body, headers=call.headers, remote=call.address)
        announced.append(announced_from((), request))
        return ForwardedAnswer(Response())

    async with running(memory_parts(make_run())) as world, answering(answer) as port, linked(port) as link:
        relay = GatewayRelay(world.run, link, Callers(proxies=(), trusted=()), SystemClock())
        handler = next(route.handler for route in relay.routes() if route.path == "/v1/peers")
        body = world.signed(PeersRequest(port=8_400), ANNA)
        for headers in ({}, {"x-forwarded-for": "203.0.113.5"}):
            await handler(Request(params={}, body=body, headers=headers, remote="198.51.100.7"))
    assert announced == ["198.51.100.7", ""]


async def test_an_overloaded_coordinator_takes_any_claimant_that_a_gateway_names() -> None:
    web, (parts, server) = AiohttpServer(), hearing(memory_parts(make_run(), **LISTENS, lag_ms_max=50.0))
    async with running(replace(parts, web=web)), linked(server.port, parts.run.digest) as link:
        assert web.shedding is not None
        web.shedding.pressure = PRESSURE_MAX
        for _ in range(3):
            with pytest.raises(RemoteError) as error:
                await link.ask(ForwardedCall("/v1/keys", claimant="\udcff"))
            assert error.value.code is not ErrorCode.INTERNAL
