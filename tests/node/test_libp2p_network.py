"""libp2p under attack, on a bad line and on a slow machine. The promises of every network are in conformance/test_peers.py."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from tests.time_world import until

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from multiaddr import Multiaddr

from prime_node.adapters.peers.libp2p_host import PeerSettings
from prime_node.adapters.peers.libp2p_network import Libp2pNetwork, is_quiet
from prime_node.ports.peer_network import PeerAddress
from prime_node.ports.transport import Unreachable
from prime_protocol.identity import KeyId, SigningKey
from prime_protocol.peer_frames import stream_protocol

RUN = "a" * 64
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
MakePeer = Callable[..., Awaitable[Libp2pNetwork]]


async def echo(asker: KeyId, payload: bytes) -> bytes:
    return asker.encode() + b" " + payload


@pytest.fixture
async def peer() -> AsyncIterator[MakePeer]:
    """Factory of started peers that echo: `await peer(bootstrap=(address,))`."""
    made: list[Libp2pNetwork] = []

    async def make(**changed: Any) -> Libp2pNetwork:
        settings = PeerSettings(**{"listen": LOOPBACK, "heartbeat_s": 4.0, **changed})
        network = Libp2pNetwork(SigningKey(bytes([len(made) + 1]) * 32), run=RUN, settings=settings)
        network.serve("echo", echo, request_bytes_max=1_024)
        made.append(network)
        await network.start()
        return network

    yield make
    for network in made:
        await network.close()


def where(network: Libp2pNetwork) -> PeerAddress:
    return PeerAddress(network.peer_id, network.addresses())


async def hello(network: Libp2pNetwork, other: Libp2pNetwork) -> bytes:
    return await network.request(other.peer_id, "echo", b"hello", timeout_s=10.0, reply_bytes_max=1_024)


async def outsider(act: Callable[..., Awaitable[None]], **options: object) -> None:
    """Run `act(host)` with a libp2p host that follows none of our rules."""

    def turn() -> None:
        async def main() -> None:
            host = new_host(key_pair=create_new_key_pair(bytes([99]) * 32), **options)
            async with host.run(listen_addrs=[]):
                await act(host)
                await host.close()

        trio.run(main)

    await asyncio.to_thread(turn)


async def test_nobody_gets_in_by_plaintext(peer: MakePeer) -> None:
    """With the library's default a peer that speaks plaintext may claim any peer id."""
    victim = await peer()
    pair = create_new_key_pair(bytes([7]) * 32)

    async def impersonate(host: object) -> None:
        with pytest.raises(Exception, match="unable to connect"):
            await host.connect(PeerInfo(ID.from_string(victim.peer_id), [Multiaddr(victim.addresses()[0])]))  # type: ignore[attr-defined]

    await outsider(impersonate, sec_opt={PLAINTEXT_PROTOCOL_ID: InsecureTransport(pair)})
    assert victim.connected() == ()


async def test_a_peer_dials_only_peers_that_it_was_asked_to_dial(peer: MakePeer) -> None:
    """The library's default dials every address that it has ever received."""
    anna, ben, carla = await peer(heartbeat_s=0.2), await peer(), await peer()
    await anna.connect(where(ben))
    await ben.connect(where(carla))
    anna.learn((where(carla),))
    await until(lambda: anna.heard_s.get(ben.peer_id))
    assert [link.peer for link in anna.connected()] == [ben.peer_id]


async def test_a_link_that_goes_silent_is_dropped_within_three_signs_of_life(peer: MakePeer) -> None:
    anna, ben = await peer(heartbeat_s=0.5), await peer()  # a busy machine may take a second to the first answer
    await anna.connect(where(ben))
    await hello(anna, ben)
    frozen, thaw = threading.Event(), threading.Event()

    async def freeze() -> None:
        frozen.set()
        thaw.wait()  # blocks ben's loop: its sockets stay open and send nothing

    ben.thread.spawn(freeze)
    await asyncio.to_thread(frozen.wait)
    await until(lambda: not anna.connected())
    with pytest.raises(Unreachable):
        await hello(anna, ben)
    thaw.set()


@pytest.mark.parametrize("later_s", [0.1, 1.9, 2.1, 3.9])
def test_of_two_peers_with_nothing_to_send_one_asks_in_each_interval(later_s: float) -> None:
    heartbeat_s, rounds = 4.0, 10
    heard_s, asked = {"anna": 0.0, "ben": 0.0}, 0
    for begins_s in (heartbeat_s * number for number in range(1, rounds + 1)):
        for name, now_s in (("anna", begins_s), ("ben", begins_s + later_s)):
            if is_quiet(now_s - heard_s[name], heartbeat_s):
                asked += 1
                heard_s = dict.fromkeys(heard_s, now_s)  # the question and its answer
    assert rounds <= asked <= rounds + 1


async def test_a_machine_that_was_suspended_drops_no_peer_for_it(peer: MakePeer) -> None:
    anna, ben = await peer(heartbeat_s=0.3), await peer()
    await anna.connect(where(ben))
    await hello(anna, ben)
    assert anna.running is not None
    links, woken = anna.running.streams.links(ben.peer_id), threading.Event()

    async def stand_still() -> None:
        threading.Event().wait(4 * 0.3)  # longer than a silent peer is given
        woken.set()

    anna.thread.spawn(stand_still)
    await asyncio.to_thread(woken.wait)
    heard_s = anna.heard_s[ben.peer_id]
    await until(lambda: anna.heard_s.get(ben.peer_id) != heard_s)  # a round has passed
    assert anna.running.streams.links(ben.peer_id) == links != []


async def test_a_bootstrap_peer_is_dialled_at_the_start(peer: MakePeer) -> None:
    hub = await peer()
    newcomer = await peer(bootstrap=(where(hub),))
    await until(newcomer.connected)
    assert await hello(newcomer, hub) == newcomer.peer_id.encode() + b" hello"


async def test_rubbish_on_a_stream_ends_the_stream_and_nothing_else(peer: MakePeer) -> None:
    victim, friend = await peer(), await peer()
    await friend.connect(where(victim))

    async def send_rubbish(host: object) -> None:
        target = ID.from_string(victim.peer_id)
        await host.connect(PeerInfo(target, [Multiaddr(victim.addresses()[0])]))  # type: ignore[attr-defined]
        for rubbish in (b"\xff" * 64, b"\0" * 4 + b"\xff" * 4, bytes(4) + b"\0\0\4\1" + bytes(9)):
            stream = await host.new_stream(target, [stream_protocol(RUN, "echo")])  # type: ignore[attr-defined]
            await stream.write(rubbish)
            await stream.close()

    from libp2p.crypto.x25519 import create_new_key_pair as noise_pair
    from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
    from libp2p.security.noise.transport import Transport

    pair = create_new_key_pair(bytes([99]) * 32)
    await outsider(send_rubbish, sec_opt={NOISE: Transport(pair, noise_privkey=noise_pair().private_key)})
    assert await hello(friend, victim) == friend.peer_id.encode() + b" hello"


async def test_identify_sends_the_announced_addresses(peer: MakePeer) -> None:
    anna = await peer()
    assert anna.running is not None
    addresses = [str(address) for address in anna.running.host.get_addrs()]
    assert addresses == [f"{anna.addresses()[0]}/p2p/{anna.peer_id}"]


async def test_a_private_peer_leaves_no_address_with_whom_it_links_to(peer: MakePeer) -> None:
    anna, cora = await peer(), await peer()
    hidden = await peer(private=True, announce=("/ip4/203.0.113.7/tcp/4001",))
    for other in (cora, hidden):
        await other.connect(where(anna))
        await hello(other, anna)
        await other.provide(RUN)

    def learned(of: Libp2pNetwork) -> tuple[int, bool]:
        """Return what a host has learned: addresses from Identify, and an entry in its table of hints."""
        assert anna.running is not None
        peerstore, name = anna.running.host.get_peerstore(), ID.from_string(of.peer_id)
        addresses = peerstore.addrs(name) if name in peerstore.peer_ids() else []
        return len(addresses), name in anna.running.hints.table.routing_table.get_peer_ids()

    await until(lambda: learned(cora) == (1, True))
    assert learned(hidden) == (0, False)
    assert hidden.running is not None
    assert not hidden.running.host.get_transport_addrs()
    assert [one.peer for one in await anna.providers(RUN)] == [cora.peer_id]
    assert hidden.peer_id not in {one.peer for one in anna.known()}


async def test_after_the_thread_has_ended_every_peer_is_unreachable(peer: MakePeer) -> None:
    anna, ben = await peer(), await peer()
    await anna.connect(where(ben))

    async def crash() -> None:
        raise RuntimeError("a bug in a library")

    anna.thread.spawn(crash)
    await anna.ended()
    with pytest.raises(Unreachable):
        await hello(anna, ben)
    with pytest.raises(Unreachable):
        await anna.connect(where(ben))
    await anna.close()


async def test_a_cancelled_request_lets_the_next_one_through(peer: MakePeer) -> None:
    anna, ben = await peer(), await peer()
    await anna.connect(where(ben))
    asking = asyncio.ensure_future(hello(anna, ben))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await hello(anna, ben) == anna.peer_id.encode() + b" hello"


async def test_a_host_whose_listening_sockets_are_closed_has_no_addresses(peer: MakePeer) -> None:
    """While a host stops, libp2p still lists its closed sockets: a caller met "Bad file descriptor" then."""
    network = await peer()
    assert network.addresses()
    assert network.running is not None
    listeners = [one for each in network.running.host.get_network().listeners.values() for one in each.listeners]
    assert listeners

    async def close_sockets() -> None:
        for listener in listeners:
            await listener.aclose()

    await network.thread.call(close_sockets)
    assert network.addresses() == ()
