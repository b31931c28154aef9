"""What a gateway and its writer do when a link, a stream or a leader's term ends, and when bodies are mixed up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.node.coordinator_world import ANNA, BEN, make_parcel, make_run, memory_parts, refused
from tests.node.gateway_world import two_gateways
from tests.node.link_world import answering, linked, raw_gateway
from tests.node.seeded_parts_world import SimulatedServer
from tests.node.standby_world import Place
from tests.time_world import VirtualClock, turns, until

from prime_node.adapters.link.sealed_frames import FrameKind, LinkFrame
from prime_node.coordinator.daemon import serve_coordinator
from prime_node.coordinator.gateway.relay import LiveRelay
from prime_node.ports.web import Request, Response
from prime_node.ports.writer_link import ForwardedAnswer, ForwardedCall
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.parcel import open_parcel


async def pieces(*sent: bytes, broken: bool = False) -> AsyncIterator[bytes]:
    """Yield the pieces of a stream, which breaks off or ends."""
    for piece in sent:
        yield piece
    if broken:
        raise RemoteError(ErrorCode.UNAVAILABLE, "the writer restarts")


async def test_a_viewer_at_a_gateway_gets_the_changes_after_streams_that_fail_break_off_or_end() -> None:
    streams = [None, pieces(b"id: 6\n\n", broken=True), pieces(b"id: 7\n\n"), None, pieces(b"id: 8\n\n")]
    asked = []

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        asked.append(call.query["since"])
        if not streams or (stream := streams.pop(0)) is None:
            raise RemoteError(ErrorCode.UNAVAILABLE, "there is no writer now")
        return ForwardedAnswer(Response(stream))

    async with answering(answer) as port, linked(port) as link, asyncio.timeout(20.0):
        relay = LiveRelay(link, VirtualClock())
        relay.begin_at(5)
        relay.enter("a network")
        seen = b""
        async for frame in relay.frames(5):
            seen += frame
            if b"id: 8" in seen:
                break
        relay.leave("a network")
    assert [line for line in seen.split() if line.isdigit()] == [b"3000", b"6", b"7", b"8"]
    assert asked[:5] == ["5", "5", "6", "7", "7"]


@pytest.mark.parametrize("when", ["before its body is wanted", "while its body is wanted"])
async def test_a_writer_waits_for_no_body_of_a_gateway_that_has_left(when: str) -> None:
    asked, has_left, failed = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop().create_future()

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        assert call.parcel is not None
        asked.set()
        if when.startswith("before"):
            await has_left.wait()
        try:
            await call.parcel.fetch()
        except RemoteError as error:
            failed.set_result(error.code)
        return ForwardedAnswer(Response())

    async with answering(answer) as port, asyncio.timeout(10.0):
        async with raw_gateway(port) as gateway:
            head = {"path": "/v1/rollouts", "parcel": ["b" * 64, 1, bytes(64).hex()]}
            gateway.send(gateway.sealer.seal(LinkFrame(FrameKind.CALL, 1, head)))
            await asked.wait()
            async for frame in gateway.frames():
                if frame.kind is (FrameKind.ALIVE if when.startswith("before") else FrameKind.WANT):
                    break
        await turns()
        has_left.set()
        assert await failed is ErrorCode.UNAVAILABLE


async def test_a_gateway_gets_no_answer_of_a_leader_whose_term_has_ended() -> None:
    leads, asked, may_answer = True, asyncio.Event(), asyncio.Event()

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        asked.set()
        await may_answer.wait()
        return ForwardedAnswer(Response(b"a former leader's"))

    async with answering(answer, may_send=lambda: leads) as port, linked(port) as link, asyncio.timeout(10.0):
        asking = asyncio.ensure_future(link.ask(ForwardedCall("/v1/head")))
        await asked.wait()
        leads = False
        may_answer.set()
        with pytest.raises(RemoteError, match="no link to the coordinator"):
            await asking


async def test_a_former_leader_refuses_what_it_has_decided_whatever_carries_its_answers() -> None:
    """Its web server and its links cut what they still hold; here neither does."""
    term, web, stop = Place(), SimulatedServer(), asyncio.Event()
    parts = replace(memory_parts(make_run()), leadership=term, web=web)
    daemon = asyncio.create_task(serve_coordinator(parts, stop))
    await until(lambda: web.routes)
    route = web.routes["GET", "/v1/run"]
    asked = Request(params={}, body=b"", headers={}, remote="127.0.0.1")
    assert (await route.handler(asked)).body == parts.run.envelope.to_bytes()
    term.lasts = False
    with pytest.raises(RemoteError, match="may have been replaced") as caught:
        await route.handler(asked)
    assert caught.value.code is ErrorCode.UNAVAILABLE
    stop.set()
    await daemon


async def test_no_gateway_takes_the_body_of_another_bundle_under_a_lease() -> None:
    async with two_gateways() as (writer, (one, other)):
        other.head = writer.head = await one.publish()
        await one.join(ANNA, BEN)
        mine, theirs = [make_parcel(await other.lease(key, rollouts_max=2), key) for key in (ANNA, BEN)]
        sizes = [len(open_parcel(parcel, body_bytes_max=len(parcel)).body) for parcel in (mine, theirs)]
        mixed = mine[: -sizes[0]] + theirs[-sizes[1] :]
        assert mixed != mine
        await refused(one, ErrorCode.DIGEST_MISMATCH, "/v1/rollouts", mixed)
        assert (await one.client(ANNA).upload(mine)).bundle == digest_of(mine)


async def test_each_bundle_gets_its_own_body_in_whatever_order_a_gateway_gives_them() -> None:
    fetched = {}

    async def answer(call: ForwardedCall) -> ForwardedAnswer:
        assert call.parcel is not None
        fetched[call.parcel.digest] = await call.parcel.fetch()
        return ForwardedAnswer(Response())

    async with answering(answer) as port, raw_gateway(port) as gateway, asyncio.timeout(10.0):
        digests = {number: f"{number}" * 64 for number in (1, 2, 3)}
        for number, digest in digests.items():
            head = {"path": "/v1/rollouts", "parcel": [digest, 1, bytes(64).hex()]}
            gateway.send(gateway.sealer.seal(LinkFrame(FrameKind.CALL, number, head)))
        wanted, answered = [], 0
        async for frame in gateway.frames():
            if frame.kind is FrameKind.WANT:
                wanted.append(frame.call)
                if len(wanted) == len(digests):
                    for number in sorted(wanted, reverse=True):
                        gateway.send(gateway.sealer.seal(LinkFrame(FrameKind.GIVEN, number, body=b"%d" % number)))
            answered += frame.kind is FrameKind.ANSWER
            if answered == len(digests):
                break
    assert fetched == {digest: b"%d" % number for number, digest in digests.items()}
