"""The peer network over libp2p: TCP, Noise, yamux. NAT traversal is in libp2p_nat.py.

Waiting: this class lives in asyncio and delegates everything to trio, in a thread of its own (trio_thread.py). There `_main`
holds the host, its services and the loops that keep links. One sends heartbeats and drops silent peers, since TCP alone takes
minutes to notice a pulled plug; one redials the bootstrap peers. A peer's misbehaviour ends its stream or its links, never
the host. If the thread itself ends, every call raises Unreachable and the node continues over HTTP.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import trio
from libp2p.abc import IHost, INetConn, INetwork
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_dialling import Dialler
from prime_node.adapters.peers.libp2p_gate import ConnectionGater
from prime_node.adapters.peers.libp2p_hints import Hints
from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_node.adapters.peers.libp2p_meeting import KEY_CHARS_MAX, MEET, Meetings, hosts_by
from prime_node.adapters.peers.libp2p_nat import Holes
from prime_node.adapters.peers.libp2p_reach import ALIVE, DIAL_BACK, TEXT_BYTES_MAX, Reach
from prime_node.adapters.peers.libp2p_streams import Serve, Streams, hosts_of, leads_through_relay, settle_answer
from prime_node.adapters.peers.mdns import LocalPeers
from prime_node.adapters.peers.trio_thread import TrioThread
from prime_node.ports.peer_network import (
    ConnectedPeer,
    DeferredAnswer,
    PeerAddress,
    Reachability,
    RequestHandler,
)
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.identity import KeyId, SigningKey
from prime_protocol.peer_frames import stream_protocol

log = logging.getLogger(__name__)

MISSED_MAX = 3
"""Heartbeats that a peer may miss."""
CLOSE_S_MAX = 3.0
"""Timeout in seconds for closing all links."""


@dataclass(frozen=True, slots=True)
class RunningHost:
    """The parts of a started host. They live in the trio thread."""

    host: IHost
    streams: Streams
    hints: Hints
    holes: Holes | None
    """NAT traversal; None for a private host, which uses no relay."""
    reach: Reach
    dialler: Dialler


class Doorkeeper:
    """Observer of new links: it closes those of blocked peers, punches holes for circuits, adds other peers to the hints."""

    def __init__(self, blocked: set[KeyId], hints: Hints, holes: Holes | None, nursery: trio.Nursery) -> None:
        self._blocked = blocked
        self._hints = hints
        self._holes = holes
        self._nursery = nursery

    async def connected(self, network: INetwork, link: INetConn) -> None:
        """Handle a new link."""
        peer = str(link.muxed_conn.peer_id)
        if peer in self._blocked:
            await link.close()
        elif leads_through_relay(link) and self._holes is not None:
            self._nursery.start_soon(self._holes.punch, peer)
        else:
            self._nursery.start_soon(self._hints.meet, peer)

    async def disconnected(self, network: INetwork, link: INetConn) -> None:
        """Allow another punch once a direct link has ended."""
        if self._holes is not None and not leads_through_relay(link):
            self._holes.forget(str(link.muxed_conn.peer_id))

    async def opened_stream(self, network: INetwork, stream: Any) -> None:
        """Do nothing."""
        return

    async def closed_stream(self, network: INetwork, stream: Any) -> None:
        """Do nothing."""
        return

    async def listen(self, network: INetwork, address: Multiaddr) -> None:
        """Do nothing."""
        return

    async def listen_close(self, network: INetwork, address: Multiaddr) -> None:
        """Do nothing."""
        return


class Libp2pNetwork:
    """Implementation of PeerNetwork."""

    def __init__(self, key: SigningKey, *, run: str, settings: PeerSettings) -> None:
        self._key = key
        self._run = run
        self._settings = settings
        self.thread = TrioThread("libp2p")
        self._gate = ConnectionGater(near=_near(settings))
        self._local = LocalPeers(key.key_id, run, found=lambda address: self.learn((address,)))
        self._served: dict[str, tuple[RequestHandler, int]] = {}
        self._known: dict[KeyId, PeerAddress] = {}
        self._staying = {address.peer: address for address in settings.bootstrap[: limits.BOOTSTRAP_PEERS_MAX]}
        self._blocked: set[KeyId] = set()
        self.heard_s: dict[KeyId, float] = {}
        self.running: RunningHost | None = None

    @property
    def peer_id(self) -> KeyId:
        return self._key.key_id

    def serve(self, protocol: str, handler: RequestHandler, *, request_bytes_max: int) -> None:
        self._served[protocol] = (handler, request_bytes_max)

    def has_ended(self) -> bool:
        return self.thread.has_ended

    async def ended(self) -> None:
        await self.thread.ended()

    async def start(self) -> None:
        if self.thread.has_ended:
            await self._local.close()
            self.thread = TrioThread("libp2p")
            self.running = None
        await self.thread.start(self._main)
        if self._settings.lan and not self._settings.private and self.running is not None:
            await self._local.start([str(address) for address in self.running.host.get_transport_addrs()])

    async def close(self) -> None:
        await self._local.close()
        await self.thread.stop()
        self.running = None

    def addresses(self) -> tuple[str, ...]:
        if self._settings.private or self.running is None:
            return ()
        try:
            bound = [str(address) for address in self.running.host.get_transport_addrs()]
        except OSError:
            return ()  # its listening sockets are closed: it is stopping
        named = [address for address in bound if not address.startswith(("/ip4/0.0.0.0/", "/ip6/::/"))]
        reach = self.running.reach
        return tuple(dict.fromkeys((*self._settings.announce, *named, *reach.confirmed, *reach.relayed)))[
            : limits.PEER_ADDRESSES_MAX
        ]

    def reachability(self) -> Reachability:
        if self._settings.private:
            return Reachability.PRIVATE
        return Reachability.UNKNOWN if self.running is None else self.running.reach.found

    def punched(self) -> tuple[int, int]:
        holes = None if self.running is None else self.running.holes
        return (0, 0) if holes is None else (holes.num_punched, holes.num_tried)

    def connected(self) -> tuple[ConnectedPeer, ...]:
        if self.running is None:
            return ()
        links = list(self.running.host.get_network().connections.items())
        return tuple(
            ConnectedPeer(str(peer), is_relayed=all(map(leads_through_relay, up)), hosts=hosts_of(up))
            for peer, every in links
            if (up := [link for link in list(every) if not link.is_closed])
        )

    def link_to(self, peer: KeyId) -> ConnectedPeer | None:
        up = [] if self.running is None else self.running.streams.links(peer)
        return ConnectedPeer(peer, all(map(leads_through_relay, up)), hosts_of(up)) if up else None

    def known(self) -> tuple[PeerAddress, ...]:
        return tuple(self._known.values())

    def learn(self, peers: tuple[PeerAddress, ...]) -> None:
        for address in peers:
            if address.peer in (self.peer_id, *self._blocked):
                continue
            self._known.pop(address.peer, None)  # the newest goes last: the oldest is dropped first
            self._known[address.peer] = PeerAddress(address.peer, address.addresses[: limits.PEER_ADDRESSES_MAX])
            if len(self._known) > limits.KNOWN_PEERS_MAX:
                self._known.pop(next(iter(self._known)))

    def stay_linked(self, address: PeerAddress) -> None:
        is_new = address.peer not in self._staying and address.peer != self.peer_id
        if is_new and len(self._staying) < limits.BOOTSTRAP_PEERS_MAX:
            self._staying[address.peer] = address
            if self.running is not None:
                self.thread.spawn(functools.partial(self._stay_linked, address.peer))
        elif not is_new and address.peer in self._staying:
            self._staying[address.peer] = address  # its current address

    async def connect(self, address: PeerAddress, *, timeout_s: float = 10.0) -> ConnectedPeer:
        linked = await self.thread.call(self._connect, address, timeout_s)
        self.learn((address,))
        return linked

    async def disconnect(self, peer: KeyId) -> None:
        await self.thread.call(self._close_links, peer)

    async def block(self, peer: KeyId, reason: str) -> None:
        await self.thread.call(self._block, peer, reason)

    async def request(
        self, peer: KeyId, protocol: str, payload: bytes, *, timeout_s: float, reply_bytes_max: int
    ) -> bytes:
        return await self.thread.call(self._ask, peer, protocol, payload, timeout_s, reply_bytes_max)

    async def provide(self, digest: str) -> None:
        await self.thread.call(self._provide, digest)

    async def providers(self, digest: str) -> tuple[PeerAddress, ...]:
        return await self.thread.call(self._providers, digest)

    # In the trio thread

    @property
    def _parts(self) -> RunningHost:
        """Return the parts. The thread runs nothing that needs them before they exist."""
        assert self.running is not None
        return self.running

    async def _main(self, is_ready: Callable[[], None], stopping: trio.Event) -> None:
        host = make_host(self._key, self._settings, advertised=self._advertised)
        listen = [] if self._settings.private else [Multiaddr(address) for address in self._settings.listen]
        self._gate.guard(host)
        proven = self._gate.guard_announced_addresses(host, self._hosts_of)
        hints = Hints(
            host,
            run=self._run,
            private=self._settings.private,
            hosts_of=self._hosts_of,
            choose=self._choose_hints,
            proven=proven,
        )
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(host.run(listen_addrs=listen))
            await stack.enter_async_context(background_trio_service(hints.table))
            nursery = await stack.enter_async_context(trio.open_nursery())
            streams = Streams(host, nursery)
            is_relay, gate = self._settings.relay, self._gate
            holes = Holes(host, streams, nursery, serves_as_relay=is_relay, gate=gate, seen_at=self._seen_at)
            usable = None if self._settings.private else holes
            dialler = Dialler(host, streams, gate, usable, self._blocked)
            reach = Reach(host, self._settings, self._staying, streams, holes, self._ask)
            self.running = RunningHost(host, streams, hints, usable, reach, dialler)
            self._serve(streams, ALIVE, reach.announce_addresses, request_bytes_max=0)
            if not self._settings.private:
                await stack.enter_async_context(holes.run())
                self._serve(streams, DIAL_BACK, reach.dial_back, request_bytes_max=TEXT_BYTES_MAX)
                if is_relay:
                    meetings = Meetings(streams.hosts)
                    self._serve(streams, MEET, meetings.introduce, request_bytes_max=KEY_CHARS_MAX)
                for name, (handler, bytes_max) in self._served.items():
                    self._serve(streams, name, self._asking(handler), request_bytes_max=bytes_max)
                nursery.start_soon(reach.look)
            host.get_network().register_notifee(Doorkeeper(self._blocked, hints, usable, nursery))
            nursery.start_soon(self._keep_alive)
            for peer in list(self._staying):
                nursery.start_soon(self._stay_linked, peer)
            is_ready()
            await stopping.wait()
            await self._hang_up(host)
            nursery.cancel_scope.cancel()

    async def _hang_up(self, host: IHost) -> None:
        """Close every link, so that peers notice at once and sockets do not outlive the host."""
        with trio.move_on_after(CLOSE_S_MAX):
            async with trio.open_nursery() as nursery:
                for peer in list(host.get_network().connections):
                    nursery.start_soon(host.get_network().close_peer, peer)
            await host.close()

    def _asking(self, handler: RequestHandler) -> Callable[[str, bytes], Awaitable[bytes | DeferredAnswer]]:
        async def there(asker: str, payload: bytes) -> bytes | DeferredAnswer:
            given = await self.thread.borrow(functools.partial(handler, asker, payload), settle_answer)
            if isinstance(given, DeferredAnswer):
                after = given.after
                return DeferredAnswer(given.payload, lambda: self.thread.soon(after))
            return given

        return there

    def _serve(self, streams: Streams, name: str, answer: Serve, *, request_bytes_max: int) -> None:
        async def handle(peer: str, payload: bytes) -> bytes | DeferredAnswer:
            self.heard_s[peer] = trio.current_time()
            return await answer(peer, payload)

        streams.serve(stream_protocol(self._run, name), handle, request_bytes_max=request_bytes_max)

    async def _ask(self, peer: KeyId, protocol: str, payload: bytes, timeout_s: float, reply_bytes_max: int) -> bytes:
        if peer in self._blocked:
            raise Unreachable(f"{peer} is blocked")
        name = stream_protocol(self._run, protocol)
        try:
            with trio.fail_after(timeout_s):
                reply = await self._parts.streams.ask(peer, name, payload, reply_bytes_max=reply_bytes_max)
        except trio.TooSlowError:
            raise Unreachable(f"{peer} did not answer within {timeout_s:g} s") from None
        self.heard_s[peer] = trio.current_time()
        return reply

    async def _provide(self, digest: str) -> None:
        await self._parts.hints.provide(digest)

    async def _providers(self, digest: str) -> tuple[PeerAddress, ...]:
        return await self._parts.hints.providers(digest)

    async def _connect(self, address: PeerAddress, timeout_s: float) -> ConnectedPeer:
        return await self._parts.dialler.connect(address, timeout_s)

    async def _seen_at(self, peer: KeyId) -> frozenset[str]:
        """Return a peer's addresses as seen by the relays that this machine stays linked to."""
        relays = [one for one in list(self._staying) if self._parts.streams.has_direct_link(one)]
        return await hosts_by(relays, peer, self._ask)

    def _hosts_of(self, peer: KeyId) -> Sequence[str]:
        return () if self.running is None else self.running.streams.hosts(peer)

    def _choose_hints(self, addresses: Sequence[str]) -> Sequence[str]:
        return self._gate.choose_hints(addresses, () if self.running is None else self.running.streams.all_hosts())

    async def _close_links(self, peer: KeyId) -> None:
        await self._parts.host.get_network().close_peer(ID.from_string(peer))
        self.heard_s.pop(peer, None)

    async def _block(self, peer: KeyId, reason: str) -> None:
        if peer not in self._blocked:
            log.warning("blocked peer %s: %s", peer, reason)
        self._blocked.add(peer)
        self._known.pop(peer, None)
        await self._close_links(peer)

    async def _keep_alive(self) -> None:
        """Drop peers silent for MISSED_MAX rounds; ask the quiet ones. Stalls of this machine do not count as silence."""
        heartbeat_s, began_s = self._settings.heartbeat_s, trio.current_time()
        while True:
            await trio.sleep(heartbeat_s)
            now_s = trio.current_time()
            stalled_s, began_s = max(0.0, now_s - began_s - 2 * heartbeat_s), now_s
            linked = {link.peer for link in self.connected()}
            self.heard_s = {peer: heard_s + stalled_s for peer, heard_s in self.heard_s.items() if peer in linked}
            async with trio.open_nursery() as nursery:
                for peer in linked:
                    silent_s = now_s - self.heard_s.setdefault(peer, now_s)
                    if silent_s > MISSED_MAX * heartbeat_s:
                        log.info("peer %s sent nothing for %.0f s: disconnected", peer, silent_s)
                        nursery.start_soon(self._close_links, peer)
                    elif is_quiet(silent_s, heartbeat_s):
                        nursery.start_soon(self._ask_whether_alive, peer)

    async def _ask_whether_alive(self, peer: KeyId) -> None:
        try:
            await self._ask(peer, ALIVE, b"", self._settings.heartbeat_s, limits.PEER_ADDRESS_CHARS_MAX)
        except Exception as error:  # noqa: BLE001 - whatever it was, no heartbeat came; the next round decides
            faults.note(log, f"{peer} sent nothing in time", error)

    async def _stay_linked(self, peer: KeyId) -> None:
        await self._parts.dialler.stay_linked(peer, self._staying)

    def _advertised(self, candidates: Sequence[Multiaddr]) -> Sequence[Multiaddr]:
        """Return what Identify advertises: what may be announced and nothing else, so no address inside a home network."""
        return [Multiaddr(address) for address in self.addresses()]


def is_quiet(silent_s: float, heartbeat_s: float) -> bool:
    """Return whether to ask a peer for a sign of life.

    Of two peers with nothing to send, the second in each interval has just heard the first's question, and asks nothing.
    """
    return silent_s >= heartbeat_s / 2


def _near(settings: PeerSettings) -> list[str]:
    """Return the IP addresses that the machine's owner configured."""
    named = [*settings.listen, *settings.announce, *(text for one in settings.bootstrap for text in one.addresses)]
    return [*settings.near, *(parts[2] for text in named if len(parts := text.split("/")) > 2)]
