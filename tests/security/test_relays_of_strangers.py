"""Strangers cannot use up the places of a relay, or the meetings at it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
import trio.testing
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.custom_types import TProtocol
from libp2p.host.exceptions import StreamFailure
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage, PeerId, StopMessage
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.protocol import STOP_PROTOCOL_ID as STOP
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.relay.circuit_v2.utils import read_delimited_msg, write_delimited_msg
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr
from tests.node.libp2p_world import on_trio, on_virtual_trio

from prime_node.adapters.peers import libp2p_relay
from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_node.adapters.peers.libp2p_meeting import Meetings
from prime_node.adapters.peers.libp2p_relay import Relay
from prime_protocol import limits
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey

PLACES, SHARE = 4, 2
BOUNDS = RelayLimits(duration=60, data=2**20, max_circuit_conns=PLACES, max_reservations=PLACES)
Reserve = Callable[[IHost, ID | None], Awaitable[int]]
"""Function (asker, named peer) -> status."""


def invented(number: int) -> ID:
    return ID.from_pubkey(create_new_key_pair(bytes([number]) * 32).public_key)


@asynccontextmanager
async def relay_of(*networks: str) -> AsyncIterator[tuple[IHost, list[IHost], Reserve]]:
    """A relay, and a peer that is linked to it from each of these networks."""
    relay = make_host(SigningKey(bytes([1]) * 32), PeerSettings())
    peers = [new_host(key_pair=create_new_key_pair(bytes([100 + number]) * 32)) for number in range(len(networks))]
    seen = {str(peer.get_id()): network for peer, network in zip(peers, networks, strict=True)}

    async def reserve(asker: IHost, named: ID | None = None) -> int:
        stream = await asker.new_stream(relay.get_id(), [HOP])
        peer = None if named is None else PeerId(id=named.to_bytes())
        await write_delimited_msg(stream, HopMessage(type=HopMessage.RESERVE, peer=peer))
        status = (await read_delimited_msg(stream, HopMessage)).status
        await stream.reset()
        return int(status)

    service = Relay(
        relay, BOUNDS, lambda peer: [seen[peer]] if peer in seen else [], serves=True, is_ours=lambda _: False
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(relay.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]))
        for peer in peers:
            await stack.enter_async_context(peer.run([]))
        await stack.enter_async_context(background_trio_service(service))
        await service.event_started.wait()
        for peer in peers:
            await peer.connect(PeerInfo(relay.get_id(), relay.get_transport_addrs()))
        yield relay, peers, reserve
        for peer in peers:
            await relay.get_network().close_peer(peer.get_id())
            await peer.get_network().close_peer(relay.get_id())


@on_trio
async def test_a_reservation_is_for_the_key_of_the_link_whatever_peer_it_names() -> None:
    async with relay_of("198.51.100.7", "203.0.113.7") as (_, [stranger, honest], reserve):
        for number in range(1, PLACES + 2):
            assert await reserve(stranger, invented(number)) == StatusCode.OK
        assert await reserve(honest, honest.get_id()) == StatusCode.OK


@on_trio
async def test_one_network_has_a_share_of_the_reservations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RELAY_NETWORK_MAX", SHARE)
    networks = ["198.51.100.7"] * (SHARE + 1) + ["203.0.113.7"]
    async with relay_of(*networks) as (relay, [*near, other], reserve):
        assert [await reserve(peer, None) for peer in near[:SHARE]] == [StatusCode.OK] * SHARE
        assert await reserve(near[SHARE], None) == StatusCode.RESOURCE_LIMIT_EXCEEDED
        assert await reserve(near[0], None) == StatusCode.OK, "it renews its own"
        assert await reserve(other, None) == StatusCode.OK
        await relay.get_network().close_peer(near[0].get_id())
        assert await reserve(near[SHARE], None) == StatusCode.OK, "a peer without a link makes room"


@on_trio
async def test_networks_that_hold_all_reservations_make_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, four networks with a quarter each kept every other peer behind a NAT out of reach for an hour."""
    monkeypatch.setattr(limits, "RELAY_NETWORK_MAX", SHARE)
    networks = ["198.51.100.7"] * SHARE + ["203.0.113.7"] * SHARE + ["1.1.1.1", "1.1.1.2"]
    async with relay_of(*networks) as (_, [*flood, honest, late], reserve):
        assert [await reserve(peer, None) for peer in flood] == [StatusCode.OK] * PLACES
        assert await reserve(honest, None) == StatusCode.OK
        assert await reserve(late, None) == StatusCode.RESOURCE_LIMIT_EXCEEDED, "its network has as many as the others"


@on_trio
async def test_the_last_share_of_the_circuits_to_a_peer_is_for_networks_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, four networks used up all circuits to a peer, and to all peers."""
    monkeypatch.setattr(limits, "RELAY_TARGET_NETWORK_MAX", SHARE)
    monkeypatch.setattr(limits, "RELAY_TARGET_MAX", PLACES)
    networks = ["198.51.100.7", "203.0.113.7", "8.8.8.8", "192.0.2.8"]
    async with (
        relay_of(*networks) as (relay, [stranger, other, honest, peer], reserve),
        called(relay, peer, reserve) as (call, _),
    ):
        assert [(await call(one))[1] for one in (stranger, stranger)] == [StatusCode.OK] * 2
        assert (await call(other))[1] == StatusCode.OK
        assert (await call(other))[1] == StatusCode.RESOURCE_LIMIT_EXCEEDED
        assert (await call(honest))[1] == StatusCode.OK


@on_virtual_trio
async def test_one_network_has_a_share_of_the_meetings() -> None:
    hosts = {f"liar{number}": ("198.51.100.7",) for number in range(8)} | {
        "anna": ("203.0.113.7",),
        "ben": ("8.8.8.8",),
    }
    refused = 0
    meetings = Meetings(lambda peer: hosts[peer])

    async def meet(asker: str, wanted: str) -> None:
        nonlocal refused
        try:
            await meetings.introduce(asker, wanted.encode())
        except RemoteError:
            refused += 1

    async with trio.open_nursery() as nursery:
        for number in range(limits.RELAY_CIRCUITS_MAX):
            nursery.start_soon(meet, f"liar{number % 8}", f"nobody{number}")
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(meet, "ben", "anna")
        assert await meetings.introduce("anna", b"ben") == b"8.8.8.8"
    assert refused == limits.RELAY_CIRCUITS_MAX - limits.RELAY_NETWORK_MAX


Call = Callable[[IHost], Awaitable[tuple[INetStream, int]]]
"""Function (asker) -> its stream to the called peer, and the relay's status."""


@asynccontextmanager
async def called(relay: IHost, peer: IHost, reserve: Reserve) -> AsyncIterator[tuple[Call, list[INetStream]]]:
    """A function that asks the relay for a circuit to a peer, and the streams that the peer got."""
    assert await reserve(peer, None) == StatusCode.OK
    got: list[INetStream] = []

    async def answer(stream: INetStream) -> None:
        await read_delimited_msg(stream, StopMessage)
        await write_delimited_msg(stream, StopMessage(type=StopMessage.STATUS, status=StatusCode.OK))
        got.append(stream)
        await trio.sleep_forever()

    async def call(asker: IHost) -> tuple[INetStream, int]:
        stream = await asker.new_stream(relay.get_id(), [HOP])
        wanted = PeerId(id=peer.get_id().to_bytes())
        await write_delimited_msg(stream, HopMessage(type=HopMessage.CONNECT, peer=wanted))
        status = int((await read_delimited_msg(stream, HopMessage)).status)
        if status != StatusCode.OK:
            await stream.reset()
        return stream, status

    peer.set_stream_handler(STOP, answer)
    yield call, got


async def is_cut(stream: INetStream) -> bool:
    try:
        return not await stream.read(1)
    except StreamError:
        return True


async def status_of(asker: IHost, asked: IHost, protocol: TProtocol, message: StopMessage) -> int | None:
    """The answer's status; None if the stream is reset."""
    try:
        stream = await asker.new_stream(asked.get_id(), [protocol])
        await write_delimited_msg(stream, message)
        return int((await read_delimited_msg(stream, StopMessage)).status)
    except (StreamError, StreamFailure):
        return None


@on_trio
async def test_one_network_has_a_share_of_the_circuits_to_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, silent circuits of one stranger kept a peer behind a NAT out of reach."""
    monkeypatch.setattr(limits, "RELAY_TARGET_NETWORK_MAX", SHARE)
    monkeypatch.setattr(libp2p_relay, "PLACE_S_MIN", 0.0)
    networks = ["198.51.100.7", "198.51.100.7", "203.0.113.7", "192.0.2.7"]
    async with (
        relay_of(*networks) as (relay, [stranger, near, honest, peer], reserve),
        called(relay, peer, reserve) as (call, _),
    ):
        held = [await call(stranger) for _ in range(SHARE)]
        assert [status for _, status in held] == [StatusCode.OK] * SHARE
        assert (await call(near))[1] == StatusCode.RESOURCE_LIMIT_EXCEEDED
        assert (await call(honest))[1] == StatusCode.OK
        await held[0][0].reset()
        while (await call(near))[1] != StatusCode.OK:
            await trio.testing.wait_all_tasks_blocked(0.01)


@on_trio
async def test_the_end_of_a_circuit_ends_no_other_circuit_to_the_peer() -> None:
    async with (
        relay_of("198.51.100.7", "203.0.113.7", "192.0.2.7") as (relay, [stranger, honest, peer], reserve),
        called(relay, peer, reserve) as (call, got),
    ):
        ended, _ = await call(stranger)
        kept, _ = await call(honest)
        await ended.reset()
        assert await is_cut(got[0])
        await kept.write(b"1")
        assert await got[1].read(1) == b"1"
        await got[1].write(b"2")
        assert await kept.read(1) == b"2"


@on_trio
async def test_a_silent_circuit_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BOUNDS, "duration", 1)
    async with (
        relay_of("198.51.100.7", "203.0.113.7") as (relay, [stranger, peer], reserve),
        called(relay, peer, reserve) as (call, got),
    ):
        circuit, _ = await call(stranger)
        assert await is_cut(circuit)
        assert await is_cut(got[0])


@on_trio
async def test_a_peer_takes_circuits_from_its_own_relays_alone() -> None:
    """Before, one link of any peer brought as many links of invented keys as it had streams."""
    async with relay_of("198.51.100.7") as (ours, [stranger], _):
        call = StopMessage(type=StopMessage.CONNECT, peer=PeerId(id=b"x"))
        assert await status_of(stranger, ours, STOP, call) is None
