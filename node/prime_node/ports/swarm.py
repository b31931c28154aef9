"""A link to one peer that gives checkpoints, over whatever carries it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from prime_node.ports.transport import CheckpointSource, TimestampSource
from prime_protocol.identity import KeyId
from prime_protocol.messages import PeersReply, PeersRequest
from prime_protocol.peers import PeerNews


class PeerLink(CheckpointSource, TimestampSource, Protocol):
    """Raises PeerError and Unreachable as every CheckpointSource does."""

    def news(self) -> AsyncIterator[PeerNews]:
        """What the peer has: first everything, then what comes. Ends, with Unreachable, when the link is lost; silence of
        PEER_SILENCE_S_MAX counts as that."""
        ...

    async def peers(self) -> str:
        """The newest list of peers that it has, as the coordinator signed it."""
        ...

    async def prepare(self) -> None:
        """Pieces are about to be asked for: what they need before can be done now. Idempotent."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class PeerFinder(Protocol):
    """The coordinator, as far as it knows who is there. Requests are signed by the adapter."""

    @property
    def hosts(self) -> frozenset[str]:
        """The IP addresses that its name has led to so far, in this process."""
        ...

    async def find_peers(self, request: PeersRequest) -> PeersReply: ...


class DialBack(Protocol):
    """Tries an address that somebody has offered."""

    async def answers(self, address: str, peer: KeyId) -> bool:
        """Does `peer` itself answer there? Asks one small question, follows nothing, and takes a few seconds at most."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...
