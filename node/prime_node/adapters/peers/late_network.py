"""A peer network whose software is imported when it starts: libp2p takes a second, which a worker's join need not wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prime_node.ports.peer_network import ConnectedPeer, PeerAddress, PeerNetwork, Reachability, RequestHandler
from prime_node.ports.transport import Unreachable
from prime_protocol.identity import KeyId


class LateNetwork:
    """Implementation of PeerNetwork that makes another one at the first `start`, and until then knows no peer."""

    def __init__(self, peer_id: KeyId, make: Callable[[], PeerNetwork], *, private: bool) -> None:
        """Take the function that makes the network, in a thread. It may raise LocalError."""
        self._peer_id = peer_id
        self._make = make
        self._private = private
        self._served: list[tuple[str, RequestHandler, int]] = []
        self._made: PeerNetwork | None = None

    @property
    def peer_id(self) -> KeyId:
        return self._peer_id

    def serve(self, protocol: str, handler: RequestHandler, *, request_bytes_max: int) -> None:
        """Answer requests of a protocol once started."""
        self._served.append((protocol, handler, request_bytes_max))

    async def start(self) -> None:
        """Make the network if that is not done, then start it."""
        if self._made is None:
            made = await asyncio.to_thread(self._make)
            for protocol, handler, request_bytes_max in self._served:
                made.serve(protocol, handler, request_bytes_max=request_bytes_max)
            self._made = made
        await self._made.start()

    def has_ended(self) -> bool:
        """Return whether it stopped because of a fault, or could not be made: `start` tries again."""
        return self._made is None or self._made.has_ended()

    async def ended(self) -> None:
        await self._network.ended()

    async def close(self) -> None:
        """Stop what was started."""
        if self._made is not None:
            await self._made.close()

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which others may dial this peer: none before the start."""
        return () if self._made is None else self._made.addresses()

    def reachability(self) -> Reachability:
        if self._made is None:
            return Reachability.PRIVATE if self._private else Reachability.UNKNOWN
        return self._made.reachability()

    def punched(self) -> tuple[int, int]:
        """Return the numbers of hole punching."""
        return (0, 0) if self._made is None else self._made.punched()

    def connected(self) -> tuple[ConnectedPeer, ...]:
        return () if self._made is None else self._made.connected()

    def link_to(self, peer: KeyId) -> ConnectedPeer | None:
        """Return one of the connected peers."""
        return None if self._made is None else self._made.link_to(peer)

    def known(self) -> tuple[PeerAddress, ...]:
        return () if self._made is None else self._made.known()

    def learn(self, peers: tuple[PeerAddress, ...]) -> None:
        """Remember addresses, once started."""
        if self._made is not None:
            self._made.learn(peers)

    def stay_linked(self, address: PeerAddress) -> None:
        if self._made is not None:
            self._made.stay_linked(address)

    async def connect(self, address: PeerAddress, *, timeout_s: float = 10.0) -> ConnectedPeer:
        return await self._network.connect(address, timeout_s=timeout_s)

    async def disconnect(self, peer: KeyId) -> None:
        if self._made is not None:
            await self._made.disconnect(peer)

    async def block(self, peer: KeyId, reason: str) -> None:
        await self._network.block(peer, reason)

    async def request(
        self, peer: KeyId, protocol: str, payload: bytes, *, timeout_s: float, reply_bytes_max: int
    ) -> bytes:
        return await self._network.request(
            peer, protocol, payload, timeout_s=timeout_s, reply_bytes_max=reply_bytes_max
        )

    async def provide(self, digest: str) -> None:
        await self._network.provide(digest)

    async def providers(self, digest: str) -> tuple[PeerAddress, ...]:
        return await self._network.providers(digest)

    @property
    def _network(self) -> PeerNetwork:
        if self._made is None:
            raise Unreachable("the peer network has not started")
        return self._made
