"""Strangers cannot occupy the table of hints with streams on which they ask nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
from libp2p import new_host
from libp2p.abc import IHost
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.exceptions import StreamFailure
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.peerinfo import PeerInfo
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr

from prime_node.adapters.peers import libp2p_hints
from prime_node.adapters.peers.libp2p_hints import Hints
from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_protocol.identity import SigningKey


def on_trio(talk: Callable[[IHost, IHost, IHost], Awaitable[None]]) -> None:
    """Run `talk` with a host of ours that takes part in the table, a stranger and an honest peer of another network."""

    async def bounded() -> None:
        ours = make_host(SigningKey(bytes([1]) * 32), PeerSettings())
        stranger, honest = (new_host(key_pair=create_new_key_pair(bytes([number]) * 32)) for number in (2, 3))
        seen = {str(stranger.get_id()): ["198.51.100.7"], str(honest.get_id()): ["203.0.113.7"]}
        hints = Hints(
            ours,
            run="a" * 64,
            private=False,
            hosts_of=lambda peer: seen.get(peer, []),
            choose=lambda addresses: addresses,
            proven=lambda peer, addresses: [],
        )
        with trio.fail_after(20):
            async with (
                ours.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]),
                stranger.run([]),
                honest.run([]),
                background_trio_service(hints.table),
            ):
                for peer in (stranger, honest):
                    await peer.connect(PeerInfo(ours.get_id(), ours.get_transport_addrs()))
                await talk(ours, stranger, honest)
                for peer in (stranger, honest):
                    await ours.get_network().close_peer(peer.get_id())
                    await peer.get_network().close_peer(ours.get_id())

    trio.run(bounded)


async def ask(asker: IHost, asked: IHost) -> Message:
    stream = await asker.new_stream(asked.get_id(), [PROTOCOL_ID])
    question = Message(type=Message.FIND_NODE, key=asker.get_id().to_bytes())
    await stream.write(encode_varint_prefixed(question.SerializeToString()))
    answer = Message.FromString(await read_varint_prefixed_bytes_limited(stream, 2**16))
    await stream.reset()
    return answer


def test_streams_of_one_network_that_ask_nothing_leave_places_for_others() -> None:
    async def talk(ours: IHost, stranger: IHost, honest: IHost) -> None:
        for _ in range(libp2p_hints.STREAMS_NETWORK_MAX):
            await stranger.new_stream(ours.get_id(), [PROTOCOL_ID])
        with pytest.raises((StreamFailure, StreamError)):
            await ask(stranger, ours)
        assert (await ask(honest, ours)).type == Message.FIND_NODE

    on_trio(talk)


def test_a_stream_that_asks_nothing_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_hints, "STREAM_S_MAX", 0.2)

    async def talk(ours: IHost, stranger: IHost, honest: IHost) -> None:
        stream = await stranger.new_stream(ours.get_id(), [PROTOCOL_ID])
        with pytest.raises(StreamError):
            await stream.read(1)

    on_trio(talk)
