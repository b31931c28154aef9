"""No number of connections of one network keeps other peers away from a libp2p host."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
from libp2p.abc import IHost
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr
from tests.node.libp2p_world import on_trio
from trio.testing import wait_all_tasks_blocked

from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_node.adapters.peers.libp2p_inbound import InboundLinks
from prime_protocol import limits
from prime_protocol.identity import SigningKey

LISTENING = Multiaddr("/ip4/127.0.0.1/tcp/0")


def host_of(number: int, **settings: Any) -> IHost:
    return make_host(SigningKey(bytes([number]) * 32), PeerSettings(**settings))


@on_trio
async def test_links_that_have_ended_give_their_places_back() -> None:
    """Before, a host was unreachable after as many links as it may hold at once, whether or not they had ended."""
    ours = host_of(1, connections_max=2)
    async with ours.run([LISTENING]):
        for number in range(2, 6):
            stranger = host_of(number, listen=())
            async with stranger.run([]):
                await stranger.connect(PeerInfo(ours.get_id(), ours.get_transport_addrs()))
                await stranger.get_network().close_peer(ours.get_id())
            while ours.get_network().get_connections():
                await trio.lowlevel.checkpoint()


@on_trio
async def test_idle_sockets_leave_room_for_a_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, 512 sockets of a stranger without any key kept all others away, ten seconds each."""
    monkeypatch.setattr(limits, "PEER_HANDSHAKES_NETWORK_MAX", 4)
    ours, friend, begun = host_of(1, connections_max=32), host_of(2, listen=()), list[object]()
    upgrade = ours.get_network().upgrade_inbound_raw_conn

    async def counted(conn: object, listening: Multiaddr) -> object:
        begun.append(conn)
        return await upgrade(conn, listening)

    monkeypatch.setattr(ours.get_network(), "upgrade_inbound_raw_conn", counted)
    async with ours.run([LISTENING]), friend.run([]), contextlib.AsyncExitStack() as stack:
        port = int(str(ours.get_transport_addrs()[0]).split("/tcp/")[1].split("/")[0])
        for _ in range(64):
            await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))
        while len(begun) < 64:
            await trio.lowlevel.checkpoint()
        await friend.connect(PeerInfo(ours.get_id(), ours.get_transport_addrs()))
        await friend.get_network().close_peer(ours.get_id())


@on_trio
async def test_a_host_that_is_full_of_links_and_of_handshakes_dials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, handshakes took the places that are left for links to dial: 448 links and 64 idle sockets shut a host in."""
    monkeypatch.setattr(limits, "PEER_HANDSHAKES_NETWORK_MAX", 2)
    monkeypatch.setattr(limits, "PEER_HANDSHAKES_MAX", 2)
    monkeypatch.setattr(limits, "PEER_CONNECTIONS_NETWORK_MAX", limits.PEER_CONNECTIONS_MAX)
    ours, friend, begun = host_of(1, connections_max=8), host_of(2), list[object]()
    upgrade = ours.get_network().upgrade_inbound_raw_conn

    async def counted(conn: object, listening: Multiaddr) -> object:
        begun.append(conn)
        return await upgrade(conn, listening)

    monkeypatch.setattr(ours.get_network(), "upgrade_inbound_raw_conn", counted)
    async with ours.run([LISTENING]), friend.run([LISTENING]), contextlib.AsyncExitStack() as stack:
        for number in range(3, 9):
            stranger = host_of(number, listen=())
            await stack.enter_async_context(stranger.run([]))
            await stranger.connect(PeerInfo(ours.get_id(), ours.get_transport_addrs()))
        port = int(str(ours.get_transport_addrs()[0]).split("/tcp/")[1].split("/")[0])
        for _ in range(2):
            await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", port))
        while len(begun) < 8:
            await trio.lowlevel.checkpoint()
        await ours.connect(PeerInfo(friend.get_id(), friend.get_transport_addrs()))
        for peer in list(ours.get_network().connections):
            await ours.get_network().close_peer(peer)


@dataclass(eq=False)
class _Socket:
    """A connection from an address, whose handshake ends when `ready` is set, and whose link when `event_closed` is."""

    host: str
    ready: trio.Event = field(default_factory=trio.Event)
    event_closed: trio.Event = field(default_factory=trio.Event)
    is_linked: bool = False
    is_closed: bool = False
    reads: bool = True
    """Whether its other side reads, which the end of a link in order waits for."""

    @property
    def stream(self) -> SimpleNamespace:
        return SimpleNamespace(socket=SimpleNamespace(getpeername=lambda: (self.host, 1)))

    async def close(self) -> None:
        self.is_closed = True
        self.ready.set()
        if not self.reads:
            await trio.sleep_forever()
        self.event_closed.set()


class _World:
    """Inbound links of a host without a network. `ended` are the connections that it no longer serves."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        self._links = InboundLinks(SimpleNamespace(upgrade_inbound_raw_conn=self._upgrade), 512)
        self.ended: list[_Socket] = []

    async def _upgrade(self, conn: Any, listening: Multiaddr) -> Any:
        await conn.stream.ready.wait()
        if conn.stream.is_closed:
            raise OSError("closed")
        conn.stream.is_linked = True
        return conn.stream

    async def dial(self, host: str, *, ready: bool = False) -> _Socket:
        socket = _Socket(host)
        if ready:
            socket.ready.set()
        self._nursery.start_soon(self._serve, socket)
        await wait_all_tasks_blocked()
        return socket

    async def _serve(self, socket: _Socket) -> None:
        await self._links.take(socket, LISTENING)
        self.ended.append(socket)


@on_trio
async def test_one_network_has_a_share_of_the_links() -> None:
    async with trio.open_nursery() as nursery:
        world = _World(nursery)
        links = [
            await world.dial(f"93.184.216.{number}", ready=True)
            for number in range(limits.PEER_CONNECTIONS_NETWORK_MAX)
        ]
        assert all(link.is_linked for link in links)
        assert not (await world.dial("93.184.216.200", ready=True)).is_linked
        assert (await world.dial("1.1.1.1", ready=True)).is_linked
        links[0].event_closed.set()
        await wait_all_tasks_blocked()
        assert (await world.dial("93.184.216.200", ready=True)).is_linked
        nursery.cancel_scope.cancel()


@on_trio
async def test_a_full_host_ends_the_newest_link_of_the_network_with_most_for_a_network_with_fewer() -> None:
    """Before, four networks with a quarter each kept all others away, and the host itself from dialling anyone."""
    async with trio.open_nursery() as nursery:
        world = _World(nursery)
        of_each = limits.PEER_CONNECTIONS_INBOUND_MAX // 4
        flood = [
            await world.dial(f"93.184.{network}.{number}", ready=True)
            for network in range(4)
            for number in range(of_each)
        ]
        assert not world.ended
        assert (await world.dial("93.184.0.250", ready=True)) in world.ended, "a flood ends no link of another"
        friends = [await world.dial(f"1.1.{number}.1", ready=True) for number in range(8)]
        assert not set(friends) & set(world.ended)
        assert {link for link in flood if link in world.ended} == {
            flood[of_each * network - place] for network in range(1, 5) for place in (1, 2)
        }
        nursery.cancel_scope.cancel()


@on_trio
async def test_links_that_read_nothing_leave_their_places_at_once() -> None:
    """Before, each of them was closed in order, for seconds, and left its place to two newcomers, until the host was full."""
    async with trio.open_nursery() as nursery:
        world, of_each = _World(nursery), limits.PEER_CONNECTIONS_INBOUND_MAX // 4
        for network in range(4):
            for number in range(of_each):
                (await world.dial(f"93.184.{network}.{number}", ready=True)).reads = False
        friends = [await world.dial(f"1.1.{number}.1", ready=True) for number in range(16)]
        assert len(world.ended) == len(friends)
        assert not set(friends) & set(world.ended)
        nursery.cancel_scope.cancel()


@on_trio
async def test_addresses_of_ipv6_count_by_network() -> None:
    """The library knows no address of theirs: all such links would count as one network."""
    async with trio.open_nursery() as nursery:
        world = _World(nursery)
        for number in range(limits.PEER_CONNECTIONS_NETWORK_MAX):
            assert (await world.dial(f"2606:4700::{number:x}", ready=True)).is_linked
        assert not (await world.dial("2606:4700::ffff", ready=True)).is_linked
        assert (await world.dial("2606:4701::1", ready=True)).is_linked
        nursery.cancel_scope.cancel()


@on_trio
async def test_a_newer_handshake_ends_the_oldest_of_the_network_with_most() -> None:
    async with trio.open_nursery() as nursery:
        world = _World(nursery)
        friend = await world.dial("1.1.1.1")
        flood = [await world.dial(f"93.184.216.{number}") for number in range(limits.PEER_HANDSHAKES_NETWORK_MAX + 3)]
        assert world.ended == flood[:3]
        for number in range(limits.PEER_HANDSHAKES_MAX - 16):
            await world.dial(f"93.{number}.0.1")
        assert friend not in world.ended
        friend.ready.set()
        await wait_all_tasks_blocked()
        assert friend.is_linked
        nursery.cancel_scope.cancel()
