"""A peer network inside one process: the port's contract without sockets, for tests and simulations.

A `MemorySwitch` is the internet; each `MemoryNetwork` plugged into it is one peer. A peer with `dialable=False` is behind a
NAT: it dials others but cannot be dialled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import NoReturn

from prime_node.ports.peer_network import (
    ConnectedPeer,
    DeferredAnswer,
    PeerAddress,
    Reachability,
    RequestHandler,
)
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import KeyId


def memory_address(peer: KeyId) -> str:
    """Return the fake address of a peer. It looks like an address of this machine, as in a run on one machine."""
    return f"/ip4/127.0.0.1/tcp/{1_024 + int(digest_of(peer.encode())[:8], 16) % 60_000}"


class MemorySwitch:
    """Registry of every started peer, and of provider records."""

    def __init__(self) -> None:
        self.peers: dict[KeyId, MemoryNetwork] = {}
        self.provided: dict[tuple[str, str], set[KeyId]] = {}


class MemoryNetwork:
    """Implementation of PeerNetwork. `cut` disconnects the peer without notice, as a pulled plug does."""

    def __init__(
        self, switch: MemorySwitch, peer_id: KeyId, *, run: str, dialable: bool = True, private: bool = False
    ) -> None:
        self._switch = switch
        self._peer_id = peer_id
        self._run = run
        self._dialable = dialable and not private
        self._private = private
        self._links: set[KeyId] = set()
        self._blocked: set[KeyId] = set()
        self._served: dict[str, tuple[RequestHandler, int]] = {}
        self._under_way: Counter[KeyId] = Counter()
        self._known: dict[KeyId, PeerAddress] = {}
        self._answering: set[asyncio.Future[bytes | DeferredAnswer]] = set()
        self._staying: dict[KeyId, PeerAddress] = {}
        self._fault = asyncio.Event()

    @property
    def peer_id(self) -> KeyId:
        return self._peer_id

    def serve(self, protocol: str, handler: RequestHandler, *, request_bytes_max: int) -> None:
        if not self._private:
            self._served[protocol] = (handler, request_bytes_max)

    async def start(self) -> None:
        """Join the switch, and link to the peers of `stay_linked`."""
        self._fault.clear()
        self._switch.peers[self._peer_id] = self
        for address in self._staying.values():
            with contextlib.suppress(Unreachable):
                self._link(address)

    def has_ended(self) -> bool:
        """Return whether the network ended by `fail`."""
        return self._fault.is_set()

    async def ended(self) -> None:
        """Wait until the network ends by `fail`."""
        await self._fault.wait()

    async def fail(self) -> None:
        """End as a network does whose thread hits a bug."""
        await self.close()
        self._fault.set()

    async def close(self) -> None:
        """Leave the switch. Idempotent."""
        self._switch.peers.pop(self._peer_id, None)
        for peer in list(self._links):
            await self.disconnect(peer)
        for task in list(self._answering):
            task.cancel()

    cut = close

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses that others can dial; none behind a NAT."""
        return () if self._private or not self._dialable else (memory_address(self._peer_id),)

    def reachability(self) -> Reachability:
        """Return the reachability, as the constructor's arguments say."""
        if self._private:
            return Reachability.PRIVATE
        return Reachability.PUBLIC if self._dialable else Reachability.OUTBOUND

    def punched(self) -> tuple[int, int]:
        """Return (0, 0): no holes are punched here."""
        return (0, 0)

    def connected(self) -> tuple[ConnectedPeer, ...]:
        """Return the linked peers."""
        return tuple(ConnectedPeer(peer, is_relayed=False) for peer in sorted(self._links))

    def link_to(self, peer: KeyId) -> ConnectedPeer | None:
        """Return a linked peer."""
        return ConnectedPeer(peer, is_relayed=False) if peer in self._links else None

    def known(self) -> tuple[PeerAddress, ...]:
        return tuple(self._known.values())

    def learn(self, peers: tuple[PeerAddress, ...]) -> None:
        """Record addresses of peers. The oldest are dropped beyond KNOWN_PEERS_MAX."""
        for address in peers:
            if address.peer == self._peer_id:
                continue
            self._known.pop(address.peer, None)
            self._known[address.peer] = address
            if len(self._known) > limits.KNOWN_PEERS_MAX:
                self._known.pop(next(iter(self._known)))

    def stay_linked(self, address: PeerAddress) -> None:
        """Link as soon as both are there."""
        if len(self._staying) < limits.BOOTSTRAP_PEERS_MAX:
            self._staying[address.peer] = address
            with contextlib.suppress(Unreachable):
                self._link(address)

    async def connect(self, address: PeerAddress, *, timeout_s: float = 10.0) -> ConnectedPeer:
        return self._link(address)

    def _link(self, address: PeerAddress) -> ConnectedPeer:
        if address.peer in self._links:
            return ConnectedPeer(address.peer, is_relayed=False)
        other = self._switch.peers.get(address.peer)
        dialled = memory_address(address.peer) in address.addresses
        if other is None or not dialled or not other._dialable or other._run != self._run:
            raise Unreachable(f"{address.peer}: no peer answers at {', '.join(address.addresses) or 'no address'}")
        if address.peer in self._blocked or self._peer_id in other._blocked:
            raise Unreachable(f"{address.peer} is blocked, or blocks this peer")
        self._links.add(other._peer_id)
        other._links.add(self._peer_id)
        self.learn((address,))
        return ConnectedPeer(address.peer, is_relayed=False)

    async def disconnect(self, peer: KeyId) -> None:
        self._links.discard(peer)
        other = self._switch.peers.get(peer)
        if other is not None:
            other._links.discard(self._peer_id)

    async def block(self, peer: KeyId, reason: str) -> None:
        """Close the link to a peer, and refuse it from now on."""
        self._blocked.add(peer)
        self._known.pop(peer, None)
        await self.disconnect(peer)

    async def request(
        self, peer: KeyId, protocol: str, payload: bytes, *, timeout_s: float, reply_bytes_max: int
    ) -> bytes:
        other = self._switch.peers.get(peer)
        if peer not in self._links or other is None:
            raise Unreachable(f"no link to {peer}")
        try:
            async with asyncio.timeout(timeout_s):
                reply = await other._answer(self._peer_id, protocol, payload)
        except TimeoutError:
            raise Unreachable(f"{peer} did not answer within {timeout_s:g} s") from None
        if len(reply) > reply_bytes_max:
            raise LimitExceeded("reply_bytes_max", len(reply), reply_bytes_max)
        return reply

    async def provide(self, digest: str) -> None:
        """Record that this peer provides a digest. A private peer records nothing."""
        if not self._private:
            self._switch.provided.setdefault((self._run, digest), set()).add(self._peer_id)

    async def providers(self, digest: str) -> tuple[PeerAddress, ...]:
        """Return the peers that provide a digest."""
        found = self._switch.provided.get((self._run, digest), set()) - {self._peer_id}
        return tuple(PeerAddress(peer, (memory_address(peer),)) for peer in sorted(found))

    async def _answer(self, asker: KeyId, protocol: str, payload: bytes) -> bytes:
        """Answer as the asked peer does: bounded, and with the handler's error as the answer."""
        handler, request_bytes_max = self._served.get(protocol, (_serves_nobody, limits.COUNT_MAX))
        if len(payload) > request_bytes_max:
            raise LimitExceeded("request_bytes_max", len(payload), request_bytes_max)
        if self._under_way[asker] >= limits.PEER_REQUESTS_MAX:
            raise RemoteError(
                ErrorCode.TOO_MANY_REQUESTS, f"{limits.PEER_REQUESTS_MAX} of your requests are in progress"
            )
        self._under_way[asker] += 1
        task = asyncio.ensure_future(handler(asker, payload))
        self._answering.add(task)
        try:
            answer = await task
            if isinstance(answer, DeferredAnswer):
                answer.after()
                return answer.payload
            return answer
        except asyncio.CancelledError:
            if task.cancelled() and self._peer_id not in self._switch.peers:
                raise Unreachable(f"{self._peer_id} left the network") from None
            raise
        finally:
            self._answering.discard(task)
            self._under_way[asker] -= 1


async def _serves_nobody(asker: KeyId, payload: bytes) -> NoReturn:
    raise RemoteError(ErrorCode.NOT_FOUND, "this peer does not serve this request")
