"""Strangers cannot occupy the table of hints, and no message to it occupies the thread of all links."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

from libp2p import new_host
from libp2p.abc import IHost
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.exceptions import StreamFailure
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.kad_dht import _encode_key
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.peer.peerstore import create_signed_peer_record
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import encode_varint_prefixed, read_varint_prefixed_bytes_limited
from multiaddr import Multiaddr
from tests.node.libp2p_world import on_trio

from prime_node.adapters.peers import libp2p_hints
from prime_node.adapters.peers.libp2p_bounds import PEER_ID_BYTES_MAX, TABLE_MESSAGE_BYTES_MAX
from prime_node.adapters.peers.libp2p_hints import Hints
from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.identity import SigningKey


@asynccontextmanager
async def three_hosts() -> AsyncIterator[tuple[IHost, IHost, IHost]]:
    """A host of ours that takes part in the table, a stranger and an honest peer of another network."""
    ours = make_host(SigningKey(bytes([1]) * 32), PeerSettings())
    stranger, honest = (new_host(key_pair=create_new_key_pair(bytes([number]) * 32)) for number in (2, 3))
    seen = {str(stranger.get_id()): ["198.51.100.7"], str(honest.get_id()): ["203.0.113.7"]}
    hints = hints_of(ours, seen)
    async with (
        ours.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]),
        stranger.run([]),
        honest.run([]),
        background_trio_service(hints.table),
    ):
        for peer in (stranger, honest):
            await peer.connect(PeerInfo(ours.get_id(), ours.get_transport_addrs()))
        yield ours, stranger, honest
        for peer in (stranger, honest):
            await ours.get_network().close_peer(peer.get_id())
            await peer.get_network().close_peer(ours.get_id())


def hints_of(host: IHost, seen: dict[str, list[str]]) -> Hints:
    """The part of a host in the table, to which peers' links come from these addresses."""
    return Hints(
        host,
        run="a" * 64,
        private=False,
        hosts_of=lambda peer: seen.get(peer, []),
        choose=lambda addresses: addresses,
        proven=lambda peer, addresses: list(addresses),
    )


def named(number: int, host: str) -> PeerInfo:
    """A provider that answers at this address."""
    key = create_new_key_pair(number.to_bytes(32, "big"))
    return PeerInfo(ID.from_pubkey(key.public_key), [Multiaddr(f"/ip4/{host}/tcp/4001")])


async def ask(asker: IHost, asked: IHost) -> Message:
    stream = await asker.new_stream(asked.get_id(), [PROTOCOL_ID])
    question = Message(type=Message.FIND_NODE, key=asker.get_id().to_bytes())
    await stream.write(encode_varint_prefixed(question.SerializeToString()))
    answer = Message.FromString(await read_varint_prefixed_bytes_limited(stream, 2**16))
    await stream.reset()
    return answer


@on_trio
async def test_streams_of_one_network_that_ask_nothing_leave_places_for_others() -> None:
    async with three_hosts() as (ours, stranger, honest):
        for _ in range(libp2p_hints.STREAMS_NETWORK_MAX):
            await stranger.new_stream(ours.get_id(), [PROTOCOL_ID])
        with pytest.raises((StreamFailure, StreamError)):
            await ask(stranger, ours)
        assert (await ask(honest, ours)).type == Message.FIND_NODE


@on_trio
async def test_a_stream_that_asks_nothing_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libp2p_hints, "STREAM_S_MAX", 0.2)
    async with three_hosts() as (ours, stranger, _):
        stream = await stranger.new_stream(ours.get_id(), [PROTOCOL_ID])
        with pytest.raises(StreamError):
            await stream.read(1)


async def tell(asker: IHost, asked: IHost, message: Message) -> Message | None:
    """The answer to a message; None if its stream is reset."""
    stream = await asker.new_stream(asked.get_id(), [PROTOCOL_ID])
    try:
        await stream.write(encode_varint_prefixed(message.SerializeToString()))
        answer = Message.FromString(await read_varint_prefixed_bytes_limited(stream, 2**22))
    except StreamError:
        return None
    await stream.reset()
    return answer


@on_trio
async def test_a_peer_id_of_any_length_does_not_stop_the_links() -> None:
    """Before, one message of 400 kB occupied the thread of all links for two minutes, one of 4 MiB for hours."""
    for length in (TABLE_MESSAGE_BYTES_MAX - 200, 400_000):
        message = Message(type=Message.ADD_PROVIDER, key=b"k" * 32)
        message.providerPeers.add(id=b"x" * length)
        async with three_hosts() as (ours, stranger, honest):
            await tell(stranger, ours, message)
            assert (await ask(honest, ours)).type == Message.FIND_NODE
    with pytest.raises(ValueError, match="a peer id of 65 bytes"):
        ID(b"x" * (PEER_ID_BYTES_MAX + 1))


@on_trio
async def test_the_table_keeps_no_signed_record_and_few_addresses_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, it kept 4 MiB for each key, and sent those of twenty peers to all that asked for peers."""
    monkeypatch.setattr(libp2p_hints, "KEYS_MAX", 4)
    async with three_hosts() as (ours, stranger, honest):
        many = [Multiaddr(f"/ip4/127.1.{number // 256}.{number % 256}/tcp/1") for number in range(1_000)]
        record = create_signed_peer_record(stranger.get_id(), many, stranger.get_private_key()).marshal_envelope()
        for number in range(6):
            message = Message(type=Message.ADD_PROVIDER, key=bytes([number]) * 32, senderRecord=record)
            named = message.providerPeers.add(id=stranger.get_id().to_bytes(), signedRecord=record)
            named.addrs.extend(address.to_bytes() for address in many)
            assert await tell(stranger, ours, message) is not None
        assert ours.get_peerstore().get_peer_record(stranger.get_id()) is None
        answers = [
            await tell(honest, ours, Message(type=Message.GET_PROVIDERS, key=bytes([number]) * 32))
            for number in range(6)
        ]
        providers = [list(answer.providerPeers) for answer in answers if answer is not None]
        assert [len(peers) for peers in providers] == [1, 1, 1, 1, 0, 0], (
            "no network drops a digest for another of its own"
        )
        assert len(providers[3][0].addrs) <= limits.PEER_ADDRESSES_MAX + 1


def test_records_of_one_network_leave_places_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, twenty keys at one address kept others out of a digest for two days, and 4,096 digests ended all others."""
    monkeypatch.setattr(libp2p_hints, "KEYS_MAX", 8)
    seen: dict[str, list[str]] = {}
    store = hints_of(make_host(SigningKey(bytes([1]) * 32), PeerSettings()), seen).table.provider_store

    def add(digest: bytes, number: int, host: str) -> str:
        provider = named(number, host)
        seen[str(provider.peer_id)] = [host]
        store.add_provider(digest, provider)
        return str(provider.peer_id)

    def providers(digest: bytes) -> set[str]:
        return {str(one.peer_id) for one in store.get_providers(digest)}

    flood = [add(b"run", number, f"93.184.216.{number}") for number in range(1, 41)]
    assert len(providers(b"run")) == 20
    honest = {add(b"run", 100 + number, f"1.1.{number}.1") for number in range(10)}
    assert providers(b"run") == honest | set(flood[:10]), "the newest records of the network with most make room"
    for number in range(1, 41):
        add(b"junk" + bytes([number]), number, f"93.184.216.{number}")
    add(b"other", 200, "8.8.8.8")
    assert providers(b"other")
    assert honest < providers(b"run")


@on_trio
async def test_no_record_that_a_stranger_left_here_ends_a_search_and_no_answer_fills_it() -> None:
    """Before, a host that had any record of a digest, its own included, asked no other peer."""
    seen: dict[str, list[str]] = {}
    hosts = [make_host(SigningKey(bytes([number]) * 32), PeerSettings()) for number in (1, 2, 3)]
    ours, honest, liar = hosts
    parts = [hints_of(host, seen) for host in hosts]
    key = _encode_key(digest_of(f"{'a' * 64} {'d' * 64}".encode()))
    friend = named(100, "1.1.1.1")
    parts[1].table.provider_store.add_provider(key, friend)
    left_here = named(300, "8.8.8.8")
    for victim in (friend, left_here):
        lie = PeerInfo(victim.peer_id, [Multiaddr(f"/ip4/66.6.6.{last}/tcp/1") for last in (1, 2)])
        parts[2].table.provider_store.add_provider(key, lie)
    for number in range(18):
        lie = named(200 + number, f"93.{number}.0.1")
        seen[str(lie.peer_id)] = [f"93.{number}.0.1"]
        parts[2].table.provider_store.add_provider(key, lie)
    parts[0].table.provider_store.add_provider(key, left_here)
    parts[0].table.provider_store.add_provider(key, PeerInfo(ours.get_id(), [Multiaddr("/ip4/8.8.4.4/tcp/1")]))
    async with AsyncExitStack() as stack:
        for host, part in zip(hosts, parts, strict=True):
            await stack.enter_async_context(host.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]))
            await stack.enter_async_context(background_trio_service(part.table))
        for other in (honest, liar):
            await ours.connect(PeerInfo(other.get_id(), other.get_transport_addrs()))
            assert await parts[0].table.add_peer(other.get_id())
        found = {hint.peer: hint.addresses for hint in await parts[0].providers("d" * 64)}
        assert str(friend.peer_id) in list(found)[:3]
        assert len(found) == 1 + libp2p_hints.OF_ONE_ANSWER_MAX - 2 + 1
        assert "/ip4/1.1.1.1/tcp/4001" in found[str(friend.peer_id)], "a lie about a peer hides no answer about it"
        assert found[str(left_here.peer_id)][0] == "/ip4/8.8.8.8/tcp/4001", "what this host has seen comes first"
        for other in (honest, liar):
            await ours.get_network().close_peer(other.get_id())
