"""Who has what, by the Kademlia table of libp2p, on the trio side. Hints only.

The table lists local entries first, returns stale ones and takes seconds after churn, and anybody may write anything into it. So
nothing is decided by it: a hint is an address to try, and what is fetched there is verified like everything else. It
serves to find a first peer when the coordinator is gone. Keys are hashed with the run, because the library has one
protocol name for all tables.
"""

from __future__ import annotations

import logging

import trio
from libp2p.abc import IHost
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID

from prime_node.ports.peers import PeerAddress
from prime_protocol import limits
from prime_protocol.digest import digest_of

log = logging.getLogger(__name__)

LOOKUP_S_MAX = 20.0
MEET_S = (0.2, 1.0, 4.0)
"""A peer enters the table once Identify has said that it takes part: looked at after these times."""


class Hints:
    """One host's part of the table. A private peer only asks."""

    def __init__(self, host: IHost, *, run: str, private: bool) -> None:
        self._host = host
        self._run = run
        self._private = private
        self.table = KadDHT(host, DHTMode.CLIENT if private else DHTMode.SERVER, enable_values=False)

    async def meet(self, peer: str) -> None:
        """Take a linked peer into the table, where it takes part."""
        for pause_s in MEET_S:
            await trio.sleep(pause_s)
            try:
                if await self.table.add_peer(ID.from_string(peer)):
                    return
            except Exception as error:  # noqa: BLE001 - a hint less, and nothing else
                log.debug("%s does not enter the table of hints: %r", peer, error)

    async def provide(self, digest: str) -> None:
        if self._private:
            return
        try:
            with trio.move_on_after(LOOKUP_S_MAX):
                await self.table.provide(self._key(digest))
        except Exception as error:  # noqa: BLE001 - a hint less, and nothing else
            log.debug("no hint left for %s: %r", digest[:12], error)

    async def providers(self, digest: str) -> tuple[PeerAddress, ...]:
        found = []
        try:
            with trio.move_on_after(LOOKUP_S_MAX):
                found = await self.table.find_providers(self._key(digest), limits.PEER_HINTS_MAX)
        except Exception as error:  # noqa: BLE001 - no hint, and nothing else
            log.debug("no hints for %s: %r", digest[:12], error)
        by_peer = {str(info.peer_id): _texts(info.addrs) for info in found}  # the table names a peer more than once
        by_peer.pop(str(self._host.get_id()), None)
        return tuple(PeerAddress(peer, texts) for peer, texts in by_peer.items() if texts)[: limits.PEER_HINTS_MAX]

    def _key(self, digest: str) -> str:
        return digest_of(f"{self._run} {digest}".encode())


def _texts(addresses: list[object]) -> tuple[str, ...]:
    texts = (str(address).split("/p2p/")[0] for address in addresses if "p2p-circuit" not in str(address))
    return tuple(text for text in texts if len(text) <= limits.PEER_ADDRESS_CHARS_MAX)[: limits.PEER_ADDRESSES_MAX]
