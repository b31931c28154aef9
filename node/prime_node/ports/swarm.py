"""Links between peers, over any transport: to one that serves checkpoints, and all connections over which a machine uploads."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from prime_node.ports.transport import CheckpointSource, TimestampSource
from prime_protocol.identity import KeyId
from prime_protocol.peers import PeerUpdate
from prime_protocol.replies import PeersReply
from prime_protocol.requests import PeersRequest


class PeerLink(CheckpointSource, TimestampSource, Protocol):
    """Link to one peer. Methods raise RemoteError and Unreachable, as in every CheckpointSource."""

    def updates(self) -> AsyncIterator[PeerUpdate]:
        """Iterate over the peer's have-set: first all of it, then each addition.

        Raises Unreachable when the link is lost or the peer is silent for PEER_SILENCE_S_MAX.
        """

    async def peers(self) -> str:
        """Return the peer's newest list of peers, as the coordinator signed it."""

    async def prepare(self) -> None:
        """Prepare for requests of pieces that follow shortly. Idempotent."""

    async def close(self) -> None:
        """Close the link. Idempotent."""


class PeerFinder(Protocol):
    """The coordinator's peer discovery. The adapter signs requests."""

    @property
    def hosts(self) -> frozenset[str]:
        """Return the IP addresses to which the coordinator's name has resolved so far, in this process."""

    async def find_peers(self, request: PeersRequest) -> PeersReply:
        """Request peers; the reply holds those that the coordinator knows."""


class DialBack(Protocol):
    """Prober of an address that a peer has announced."""

    async def answers(self, address: str, peer: KeyId) -> bool:
        """Return whether `peer` itself answers at an address.

        Sends one small request, follows no redirect, and takes a few seconds at most.
        """

    async def close(self) -> None:
        """Release resources. Idempotent."""


@dataclass(frozen=True, slots=True)
class LinkReading:
    """One connection now. Example: LinkReading(3, 0.055, 0.040, 1_448_000, 43_440)."""

    link: int
    """Number that names the connection for as long as it is open."""
    round_trip_s: float
    """Round-trip time, smoothed over the last acknowledgements."""
    round_trip_s_min: float
    """Smallest round-trip time to the same host of the last minutes."""
    acked_bytes: int
    """Bytes that the other side has acknowledged, since the connection was made."""
    unacked_bytes: int
    """Bytes that were sent and are not acknowledged."""


class UploadLinks(Protocol):
    """Connections of one machine."""

    def readings(self) -> Sequence[LinkReading]:
        """Return a reading of each open connection that has measured a round trip."""

    def limit(self, link: int, bytes_per_s: float) -> None:
        """Send at most this fast on a connection, without bursts; 0 lifts the limit. One that is closed is left alone."""
