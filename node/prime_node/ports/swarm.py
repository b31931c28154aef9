"""A link to one peer that serves checkpoints, over any transport."""

from __future__ import annotations

from collections.abc import AsyncIterator
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
        ...

    async def peers(self) -> str:
        """Return the peer's newest list of peers, as the coordinator signed it."""
        ...

    async def prepare(self) -> None:
        """Prepare for requests of pieces that follow shortly. Idempotent."""
        ...

    async def close(self) -> None:
        """Close the link. Idempotent."""
        ...


class PeerFinder(Protocol):
    """The coordinator's peer discovery. The adapter signs requests."""

    @property
    def hosts(self) -> frozenset[str]:
        """Return the IP addresses to which the coordinator's name has resolved so far, in this process."""
        ...

    async def find_peers(self, request: PeersRequest) -> PeersReply:
        """Request peers; the reply holds those that the coordinator knows."""
        ...


class DialBack(Protocol):
    """Prober of an address that a peer has announced."""

    async def answers(self, address: str, peer: KeyId) -> bool:
        """Return whether `peer` itself answers at an address.

        Sends one small request, follows no redirect, and takes a few seconds at most.
        """
        ...

    async def close(self) -> None:
        """Release resources. Idempotent."""
        ...
