"""Long packets of gateways that have not arrived whole have bounded room, in which no honest gateway is cut off."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from tests.node.link_world import RawGateway, answering, call, linked, no_answer, raw_gateway
from tests.time_world import be_slow

from prime_node.adapters.link import gateway_room, link_server
from prime_node.adapters.link.gateway_room import ArrivingPackets
from prime_node.adapters.link.link_server import LinkServer
from prime_node.adapters.link.sealed_frames import HEAD_BYTES_MAX, FrameKind
from prime_node.ports.writer_link import ForwardedCall


async def answered(gateway: RawGateway) -> int:
    """Return the number of the next call that is answered; 0 if the link ends."""
    async with asyncio.timeout(30.0):
        async for frame in gateway.frames():
            if frame.kind is FrameKind.ANSWER:
                return frame.call
    return 0


async def test_packets_that_arrive_in_part_have_bounded_room_and_the_next_ones_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, each of 16 links of any address held a part of a packet of the longest body, and it counted nowhere."""
    monkeypatch.setattr(gateway_room, "ARRIVING_BYTES_MAX", 0)
    monkeypatch.setattr(link_server, "SILENT_S_MAX", 1.5)
    server = LinkServer()
    async with answering(no_answer, body_bytes_max=2**23, server=server) as port, contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(raw_gateway(port)) for _ in range(8)]
        packets = [gateway.sealer.seal(call(1, 2**23)) for gateway in gateways]
        for gateway, packet in zip(gateways, packets, strict=True):
            gateway.send(packet[:-100])
        for part in range(-100, -70):  # for twice SILENT_S_MAX
            await be_slow(0.1)
            assert sum(link.unread_bytes for link in server.links) < 2 * (2**23 + HEAD_BYTES_MAX) + 8 * 2**20
            for gateway, packet in zip(gateways, packets, strict=True):
                gateway.send(packet[part : part + 1])
        assert sum(link.unread_bytes for link in server.links) > 2**23
        # those that waited lose nothing, and have their turns
        for gateway, packet in zip(gateways, packets, strict=True):
            gateway.send(packet[-70:])
        assert await asyncio.gather(*map(answered, gateways)) == [1] * 8
        assert not server.arriving.num_bytes


async def test_a_packet_that_trickles_while_another_waits_for_its_room_ends_its_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_room, "ARRIVING_BYTES_MAX", 0)
    monkeypatch.setattr(gateway_room, "SLOW_S", 0.5)
    server = LinkServer()
    async with (
        answering(no_answer, body_bytes_max=2**22, server=server) as port,
        raw_gateway(port) as one,
        raw_gateway(port) as other,
        raw_gateway(port) as honest,
    ):
        for gateway in (one, other):
            gateway.send(gateway.sealer.seal(call(1, 2**22))[:1_000])
        await be_slow(2.0)
        assert len(server.links) == 3, "while none waits, a slow line is no fault"
        honest.send(honest.sealer.seal(call(1, 2**22)))
        assert await answered(honest) == 1
        assert await answered(one) == 0 or await answered(other) == 0


async def test_no_gateway_is_cut_that_waits_for_room_among_others_under_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gateway_room, "ARRIVING_BYTES_MAX", 0)
    async with answering(no_answer, body_bytes_max=2**23) as port, contextlib.AsyncExitStack() as stack:
        links = [await stack.enter_async_context(linked(port)) for _ in range(16)]
        asked = [link.ask(ForwardedCall("/v1/status", body=bytes(2**23))) for link in links for _ in range(4)]
        async with asyncio.timeout(60.0):
            await asyncio.gather(*asked)
        assert "link of a gateway" not in caplog.text


class WaitingLink:
    """A link that notes its turns."""

    def __init__(self, address: str) -> None:
        self.address, self.num_turns = address, 0

    def read_on(self) -> None:
        self.num_turns += 1


def test_the_packets_of_all_addresses_have_bounded_room_and_no_shorter_one_overtakes() -> None:
    room, longest = ArrivingPackets(), gateway_room.ARRIVING_BYTES_MAX // 2
    room.longest = longest
    links = [WaitingLink(f"10.0.0.{number // 4}") for number in range(40)]
    may_read = [room.enter(link, longest, 0.0) for link in links]
    assert may_read == [number % 4 < 2 and number < 16 for number in range(40)]
    late = WaitingLink("10.0.9.9")
    assert room.enter(late, 0, 0.0)
    assert not room.enter(late, 2**21, 0.0)
    room.enter(links[0], 0, 1.0)
    assert (links[2].num_turns, links[16].num_turns, late.num_turns) == (1, 0, 0)
    for link in links:
        room.leave(link, 2.0)
    assert late.num_turns == 1
    room.leave(late, 3.0)
    assert not room.num_bytes
