"""What peers say and do over libp2p neither fills nor ends a host."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.host.exceptions import StreamFailure
from libp2p.host.observed_addr_manager import ObservedAddrManager
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerdata import PeerData
from libp2p.peer.peerinfo import PeerInfo
from libp2p.utils.varint import encode_uvarint, encode_varint_prefixed
from multiaddr import Multiaddr
from tests.node.libp2p_world import on_trio

from prime_node.adapters.peers.libp2p_bounds import PROTOCOL_CHARS_MAX
from prime_node.adapters.peers.libp2p_host import KNOWN_PEERS_MAX, OLDEST_PEERS, PeerSettings, make_host
from prime_protocol import limits
from prime_protocol.identity import SigningKey


def test_a_host_keeps_its_own_keys_however_many_peers_it_meets() -> None:
    """Before, the first peer too many evicted the host's own entry, which is the oldest without addresses, and the host ended."""
    key = SigningKey(bytes([3]) * 32)
    host = make_host(key, PeerSettings(connections_max=64))
    store = host.get_peerstore()
    for number in range(KNOWN_PEERS_MAX + 20):
        store.add_addrs(ID(b"\x00\x24" + number.to_bytes(36, "big")), [], 7_200)
    assert len(store.peer_ids()) <= KNOWN_PEERS_MAX + 1
    assert ID.from_pubkey(store.privkey(host.get_id()).get_public_key()) == host.get_id()


def test_a_stranger_too_many_costs_looks_at_few_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each sorted all 4,096 peers: 14 ms of the thread that serves all links."""
    looks, get_addrs = Counter[str](), PeerData.get_addrs

    def counted(entry: PeerData) -> list[Multiaddr]:
        looks["all"] += 1
        found: list[Multiaddr] = get_addrs(entry)
        return found

    monkeypatch.setattr(PeerData, "get_addrs", counted)
    store = make_host(SigningKey(bytes([3]) * 32), PeerSettings()).get_peerstore()
    peers = [ID(b"\x00\x24" + number.to_bytes(36, "big")) for number in range(KNOWN_PEERS_MAX + 20)]
    for number, peer in enumerate(peers):
        store.add_addrs(peer, [Multiaddr("/ip4/127.0.0.1/tcp/1")] if number < OLDEST_PEERS // 2 else [], 7_200)
    assert 20 < looks["all"] <= 21 * OLDEST_PEERS
    kept = set(store.peer_ids())
    assert kept >= set(peers[: OLDEST_PEERS // 2]), "peers with an address stay"
    assert not kept & set(peers[OLDEST_PEERS // 2 : OLDEST_PEERS // 2 + 20]), "the oldest without one go"
    for peer in peers[-KNOWN_PEERS_MAX:]:
        store.add_addrs(peer, [Multiaddr("/ip4/127.0.0.1/tcp/1")], 7_200)
    looks.clear()
    store.add_addrs(ID(b"\x00\x24" + bytes(36)[1:] + b"\xff"), [], 7_200)
    store.add_addrs(ID(b"\x00\x24" + b"\xff" * 36), [], 7_200)
    assert looks["all"] <= 2 * OLDEST_PEERS
    assert len(store.peer_ids()) == KNOWN_PEERS_MAX


@contextlib.asynccontextmanager
async def linked(stranger: IHost) -> AsyncIterator[tuple[IHost, Counter[ID]]]:
    """A host of ours to which a stranger has a link. Yields it with the number of addresses that it has looked at, by peer."""
    ours, looked_at = make_host(SigningKey(bytes([1]) * 32), PeerSettings()), Counter[ID]()
    add = ours.get_peerstore().add_addrs

    def add_addrs(peer: ID, addresses: list[Multiaddr], ttl: int = 0) -> None:
        looked_at[peer] += len(addresses)
        add(peer, addresses, ttl)

    ours.get_peerstore().add_addrs = add_addrs
    async with ours.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]), stranger.run([]):
        await stranger.connect(PeerInfo(ours.get_id(), ours.get_transport_addrs()))
        yield ours, looked_at
        for one, other in ((stranger, ours), (ours, stranger)):
            await one.get_network().close_peer(other.get_id())


@on_trio
async def test_what_a_peer_says_of_itself_is_cut_before_it_is_stored() -> None:
    """Before, 1,000 addresses blocked all links for 70 ms, and a megabyte of protocols was kept for each key."""
    stranger = new_host()
    addresses = [Multiaddr(f"/ip4/127.1.{n // 256}.{n % 256}/tcp/1").to_bytes() for n in range(1_000)]
    addresses.insert(0, addresses[0] * 50)
    protocols = ["/long" * 100, *(f"/made/up/{number}" for number in range(20_000))]
    message = Identify(listen_addrs=addresses, protocols=protocols).SerializeToString()

    async def answer(stream: INetStream) -> None:
        await stream.write(encode_varint_prefixed(message))
        await stream.close()

    stranger.set_stream_handler(IDENTIFY, answer)
    async with linked(stranger) as (ours, looked_at):
        store, peer = ours.get_peerstore(), stranger.get_id()
        while peer not in store.peer_ids() or not store.get_protocols(peer):
            await trio.lowlevel.checkpoint()
        assert len(store.get_protocols(peer)) == limits.PEER_PROTOCOLS_MAX
        assert max(map(len, store.get_protocols(peer))) <= PROTOCOL_CHARS_MAX
        assert 0 < looked_at[peer] <= limits.PEER_ADDRESSES_MAX + 1


@pytest.mark.parametrize("num_names", [0, 300])
@on_trio
async def test_the_address_at_which_a_peer_sees_us_is_looked_at_if_it_is_short(
    num_names: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, one message of 12 kB blocked all links for half a minute, and one of 1 MiB for days."""
    stranger, seen = new_host(), list[tuple[object, int]]()

    def record(manager: object, link: object, observed: Multiaddr, own: object) -> None:
        seen.append((manager, len(observed.to_bytes())))

    monkeypatch.setattr(ObservedAddrManager, "record_observation", record)
    address = Multiaddr("/ip4/1.2.3.4/tcp/4001").to_bytes() + b"\x36\x01a" * num_names + b"\x37\x01a" * num_names
    message = Identify(observed_addr=address, protocols=["/made/up"]).SerializeToString()

    async def answer(stream: INetStream) -> None:
        await stream.write(encode_varint_prefixed(message))
        await stream.close()

    stranger.set_stream_handler(IDENTIFY, answer)
    async with linked(stranger) as (ours, _):
        while stranger.get_id() not in ours._identified_peers:
            await trio.lowlevel.checkpoint()
        lengths = {num_bytes for manager, num_bytes in seen if manager is ours._observed_addr_manager}
        assert lengths == (set() if num_names else {len(address)})


@on_trio
async def test_a_message_of_the_negotiation_is_short() -> None:
    """Before, the host kept what a stranger sent before any handshake: hundreds of megabytes in the ten seconds that it had."""
    ours = make_host(SigningKey(bytes([1]) * 32), PeerSettings())
    async with ours.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        port = int(str(ours.get_transport_addrs()[0]).split("/tcp/")[1].split("/")[0])
        stranger = await trio.open_tcp_stream("127.0.0.1", port)
        await stranger.send_all(encode_uvarint(2**33) + b"x")
        with trio.fail_after(5), contextlib.suppress(trio.BrokenResourceError):
            while await stranger.receive_some():
                pass
        await stranger.aclose()


@on_trio
async def test_no_peer_pushes_what_it_says_of_itself() -> None:
    stranger = new_host()
    async with linked(stranger) as (ours, _):
        with pytest.raises(StreamFailure):
            await stranger.new_stream(ours.get_id(), [ID_PUSH])


@on_trio
async def test_a_handler_that_raises_ends_its_stream_alone() -> None:
    """Before, any exception in a handler ended the host with all links."""
    stranger = new_host()

    async def fail(stream: INetStream) -> None:
        raise KeyError(await stream.read(1))

    async def answer(stream: INetStream) -> None:
        await stream.write(await stream.read(1))

    async with linked(stranger) as (ours, _):
        ours.set_stream_handler("/fails", fail)
        ours.set_stream_handler("/answers", answer)
        broken, sound = [await stranger.new_stream(ours.get_id(), [name]) for name in ("/fails", "/answers")]
        await broken.write(b"1")
        with pytest.raises(StreamError):
            await broken.read(1)
        await sound.write(b"2")
        assert await sound.read(1) == b"2"
