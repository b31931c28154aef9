"""The peer-to-peer network: connected peers and requests to one of them.

A peer's name is its key (KeyId), and every link authenticates it: an answer to `request` came from that key, and the
peer passed to a handler is the one that sent the request. Nothing else about a peer is trusted. The network belongs to
one run: peers of another run share no protocols.

Methods raise Unreachable if there was no answer, and RemoteError if the peer refused or sent an invalid answer. Nothing
is retried internally.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from prime_protocol.errors import RemoteError
from prime_protocol.identity import KeyId, PublicKey


class Reachability(StrEnum):
    """Reachability of this peer, as far as it knows."""

    UNKNOWN = "unknown"
    """No peer has tried to dial it yet."""
    PUBLIC = "public"
    """Others have dialled one of its addresses."""
    RELAYED = "relayed"
    """Behind a NAT or a firewall, with a reservation at a relay. Peers can connect, by hole punching where the NAT allows it."""
    OUTBOUND = "outbound"
    """It can dial others, but no peer can reach it. It can still fetch everything."""
    PRIVATE = "private"
    """Private by its owner's choice: it announces no address and serves nothing."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A peer and its dialable addresses. Example: PeerAddress("12D3KooW...", ("/ip4/203.0.113.7/tcp/4001",))."""

    peer: KeyId
    addresses: tuple[str, ...]
    """Multiaddrs without the /p2p part. A relay's address ends in /p2p/<relay>/p2p-circuit."""

    @staticmethod
    def parse(text: str) -> PeerAddress:
        """Parse a multiaddr that ends in /p2p/<key id>. Raises ValueError."""
        address, _, peer = text.rpartition("/p2p/")
        if not address.startswith("/"):
            raise ValueError(
                f"{text!r} is not a peer's multiaddr; write for example /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo..."
            )
        try:
            PublicKey.from_key_id(peer)
        except RemoteError as error:
            raise ValueError(f"{text!r}: {error.detail}") from None
        return PeerAddress(peer, (address,))


@dataclass(frozen=True, slots=True)
class ConnectedPeer:
    """A peer that is currently connected."""

    peer: KeyId
    is_relayed: bool
    """Whether every link to it leads through a relay: fit for small messages, too slow for bulk data."""
    hosts: tuple[str, ...] = ()
    """Remote IP addresses of its direct links."""

    @property
    def is_direct(self) -> bool:
        """Return whether at least one link is direct."""
        return not self.is_relayed


@dataclass(frozen=True, slots=True)
class DeferredAnswer:
    """A handler's answer with a callback for when it has been sent, such as freeing a slot."""

    payload: bytes
    after: Callable[[], None]
    """Callback, called once in the handler's event loop, whether or not the answer could be sent."""


RequestHandler = Callable[[KeyId, bytes], Awaitable[bytes | DeferredAnswer]]
"""(requesting peer, request) -> answer. May raise RemoteError, which the requesting peer receives."""


class PeerNetwork(Protocol):
    """One peer's view of the network. `serve` is called before `start`, everything else between `start` and `close`."""

    @property
    def peer_id(self) -> KeyId:
        """Return this peer's own key id."""

    def serve(self, protocol: str, handler: RequestHandler, *, request_bytes_max: int) -> None:
        """Answer requests of a protocol; a longer request is refused unread.

        Handlers run concurrently, at most PEER_REQUESTS_MAX for one peer. A private peer serves no others, whatever is
        registered.
        """

    async def start(self) -> None:
        """Listen and dial the bootstrap peers.

        May be called again after the network has ended. Raises LocalError if the machine cannot do it.
        """

    def has_ended(self) -> bool:
        """Return whether the network stopped because of a fault.

        If so, every call raises Unreachable and no peer is connected.
        """

    async def ended(self) -> None:
        """Wait until the network has stopped because of a fault."""

    async def close(self) -> None:
        """Stop. Idempotent. Requests in progress end as Unreachable."""

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which others may dial this peer, as far as known. Empty for a private peer."""

    def reachability(self) -> Reachability:
        """Return how others can reach this peer, as far as known."""

    def punched(self) -> tuple[int, int]:
        """Return (peers to which hole punching succeeded, peers with which it was tried) in this session."""

    def connected(self) -> tuple[ConnectedPeer, ...]:
        """Return the currently connected peers."""

    def link_to(self, peer: KeyId) -> ConnectedPeer | None:
        """Return one of the connected peers; None if it is not connected."""

    def known(self) -> tuple[PeerAddress, ...]:
        """Return the known peers, connected or not. These are hints: an address may be stale or false."""

    def learn(self, peers: tuple[PeerAddress, ...]) -> None:
        """Remember addresses, at most KNOWN_PEERS_MAX of them. Dials nothing."""

    def stay_linked(self, address: PeerAddress) -> None:
        """Connect to a bootstrap peer now and whenever the link is lost. At most BOOTSTRAP_PEERS_MAX of them."""

    async def connect(self, address: PeerAddress, *, timeout_s: float = 10.0) -> ConnectedPeer:
        """Connect to a peer.

        The link is direct if one of the peer's addresses or hole punching allows it, else through a relay. Idempotent.
        Raises Unreachable, also if the peer that answers has another key.
        """

    async def disconnect(self, peer: KeyId) -> None:
        """Close every link to a peer. Idempotent."""

    async def block(self, peer: KeyId, reason: str) -> None:
        """Close every link to a misbehaving peer and accept none from it until `close`. Idempotent."""

    async def request(
        self, peer: KeyId, protocol: str, payload: bytes, *, timeout_s: float, reply_bytes_max: int
    ) -> bytes:
        """Send a request to a connected peer and return its answer.

        Several requests may be in progress; answers come in any order. Raises Unreachable if there is no link or no
        whole answer came in time. Raises RemoteError if the peer refuses (with its code) or answers with more than
        `reply_bytes_max` (TOO_LARGE).
        """

    async def provide(self, digest: str) -> None:
        """Record in the DHT that this peer provides the content named `digest`. Takes seconds; may fail silently."""

    async def providers(self, digest: str) -> tuple[PeerAddress, ...]:
        """Return the peers that the DHT lists for `digest`: untrusted hints, possibly stale, possibly none."""
