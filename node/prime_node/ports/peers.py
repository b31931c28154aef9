"""The network between peers: who is there, requests to one of them, announcements to all.

A peer's name is its key (KeyId), and every link proves it: what `request` answers came from that key, and the peer that a
handler sees is the one that asked. Nothing else about a peer is trusted. All of it belongs to one run: peers of
another run share neither protocols nor topics.

Raises Unreachable where there was no answer, PeerError where the peer refused or sent what makes no sense. Nothing is
retried inside.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from prime_protocol.errors import PeerError
from prime_protocol.identity import KeyId, PublicKey


class Reachability(StrEnum):
    """What others can do to reach this peer, as far as it has found out."""

    UNKNOWN = "unknown"
    """Nobody has tried yet."""
    PUBLIC = "public"
    """Others have dialled one of its addresses."""
    RELAYED = "relayed"
    """Behind a NAT or a firewall, reserved at a relay: peers can call, and holes are punched where the NAT lets them."""
    OUTBOUND = "outbound"
    """It reaches others and nobody reaches it. Everything can still be fetched."""
    PRIVATE = "private"
    """By its owner's choice: it announces no address and serves nothing."""


class GossipJudgement(StrEnum):
    """What becomes of an announcement."""

    ACCEPT = "accept"
    """Handled here and forwarded."""
    REJECT = "reject"
    """Nobody honest forwards this: dropped, and it costs the peer that sent it."""
    IGNORE = "ignore"
    """Not news, or not to be judged now: dropped, and nobody is to blame."""


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer may be dialled. Example: PeerAddress("12D3KooW...", ("/ip4/203.0.113.7/tcp/4001",))."""

    peer: KeyId
    addresses: tuple[str, ...]
    """Multiaddrs without the /p2p part. One of a relay ends in /p2p/<relay>/p2p-circuit."""

    @staticmethod
    def parse(text: str) -> PeerAddress:
        """Of a multiaddr that ends in /p2p/<key id>. Raises ValueError."""
        address, _, peer = text.rpartition("/p2p/")
        if not address.startswith("/"):
            raise ValueError(
                f"{text!r} is no multiaddr of a peer: write for example /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo..."
            )
        try:
            PublicKey.from_key_id(peer)
        except PeerError as error:
            raise ValueError(f"{text!r}: {error.detail}") from None
        return PeerAddress(peer, (address,))


@dataclass(frozen=True, slots=True)
class ConnectedPeer:
    """A peer that is linked at the moment."""

    peer: KeyId
    is_relayed: bool
    """Every link to it leads through a relay: good for words, too slow for bytes."""
    hosts: tuple[str, ...] = ()
    """The IP addresses at which its direct links end."""

    @property
    def is_direct(self) -> bool:
        return not self.is_relayed


@dataclass(frozen=True, slots=True)
class DeferredAnswer:
    """What a handler answers, where something is to happen once it is on its way: a slot is free again, say."""

    payload: bytes
    after: Callable[[], None]
    """Called once, in the handler's event loop, whether the answer could be sent or not."""


RequestHandler = Callable[[KeyId, bytes], Awaitable[bytes | DeferredAnswer]]
"""(who asks, request) -> answer. May raise PeerError, which the asker then gets."""
Validate = Callable[[KeyId, bytes], Awaitable[GossipJudgement]]
"""(who sent it on, announcement) -> what becomes of it. Decides within ANNOUNCEMENT_JUDGE_S_MAX, or it counts as IGNORE."""
HandleAnnouncement = Callable[[KeyId, bytes], Awaitable[None]]
"""(who made it, announcement), after it was accepted; each one once."""


class PeerNetwork(Protocol):
    """One peer's view. `serve` and `subscribe` are called before `start`, everything else between `start` and `close`."""

    @property
    def peer_id(self) -> KeyId: ...

    def serve(self, protocol: str, handler: RequestHandler, *, request_bytes_max: int) -> None:
        """Answer requests of a protocol; a longer request is refused unread. Handlers run side by side, at most
        PEER_REQUESTS_MAX for one peer. A private peer serves nobody, whatever is registered."""
        ...

    def subscribe(self, topic: str, validate: Validate, handle: HandleAnnouncement) -> None:
        """Take part in a topic. Nothing is handled or forwarded that `validate` has not accepted."""
        ...

    async def start(self) -> None:
        """Listen, dial the bootstrap peers, join the topics; also once more after it has ended. Raises LocalError where the
        machine cannot."""
        ...

    def has_ended(self) -> bool:
        """By itself, through a fault: every call raises Unreachable, and nobody is linked."""
        ...

    async def ended(self) -> None:
        """Waits until it has."""
        ...

    async def close(self) -> None:
        """Idempotent. Requests under way end as Unreachable."""
        ...

    def addresses(self) -> tuple[str, ...]:
        """Where others may dial this peer, as far as is known: what it may announce. Empty for a private one."""
        ...

    def reachability(self) -> Reachability: ...

    def punched(self) -> tuple[int, int]:
        """(peers to which a hole was punched, peers with which it was tried) in this session."""
        ...

    def connected(self) -> tuple[ConnectedPeer, ...]: ...

    def known(self) -> tuple[PeerAddress, ...]:
        """Peers that were learnt, connected or not. Hints: an address may be stale or a lie."""
        ...

    def learn(self, peers: tuple[PeerAddress, ...]) -> None:
        """Remember addresses, at most KNOWN_PEERS_MAX of them. Nothing is dialled."""
        ...

    def stay_linked(self, address: PeerAddress) -> None:
        """Link to a peer now and whenever the link is lost: a bootstrap peer. At most BOOTSTRAP_PEERS_MAX of them."""
        ...

    async def connect(self, address: PeerAddress, *, timeout_s: float = 10.0) -> ConnectedPeer:
        """Link to a peer, directly where one of its addresses or a punched hole allows it, else through a relay.

        Idempotent. Raises Unreachable, also where whoever answers there has another key.
        """
        ...

    async def disconnect(self, peer: KeyId) -> None:
        """Close every link to it. Idempotent."""
        ...

    async def block(self, peer: KeyId, reason: str) -> None:
        """Close every link to a peer that lied and take none from it until `close`. Idempotent."""
        ...

    async def request(
        self, peer: KeyId, protocol: str, payload: bytes, *, timeout_s: float, reply_bytes_max: int
    ) -> bytes:
        """Ask a connected peer. Several requests may be under way; answers come in any order.

        Raises Unreachable where no link is up or no whole answer came in time, PeerError where the peer says no
        (its code), or answers with more than `reply_bytes_max` (TOO_LARGE).
        """
        ...

    async def announce(self, topic: str, data: bytes) -> None:
        """Tell everybody in a topic, as far as this peer's links carry it. Raises ValueError above ANNOUNCEMENT_BYTES_MAX."""
        ...

    async def provide(self, digest: str) -> None:
        """Leave a hint in the distributed table that this peer has what `digest` names. Costs seconds; may fail silently."""
        ...

    async def providers(self, digest: str) -> tuple[PeerAddress, ...]:
        """Peers that are said to have it: hints of strangers, possibly stale, possibly none."""
        ...
