"""Links from a libp2p host to a peer, on the trio side: by its addresses in parallel, then by a relay and a punched hole."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

import trio
from libp2p.abc import IHost
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_gate import ConnectionGater
from prime_node.adapters.peers.libp2p_nat import Holes
from prime_node.adapters.peers.libp2p_reach import circuits
from prime_node.adapters.peers.libp2p_streams import Streams
from prime_node.ports.peer_network import ConnectedPeer, PeerAddress
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.identity import KeyId

log = logging.getLogger(__name__)

DIAL_NEXT_S = 0.25
"""Seconds after which the next address of a peer is tried in parallel (RFC 8305)."""
DIAL_S_MAX = 10.0
"""Timeout in seconds for a bootstrap peer."""
DIAL_AGAIN_S = 15.0
"""Seconds between attempts at a bootstrap peer that does not answer."""


class Dialler:
    """Maker of one host's outgoing links."""

    def __init__(
        self, host: IHost, streams: Streams, gate: ConnectionGater, holes: Holes | None, blocked: Collection[KeyId]
    ) -> None:
        """Dial for `host`. Without `holes`, no relay is used. `blocked` may grow: its peers are not dialled."""
        self._host = host
        self._streams = streams
        self._gate = gate
        self._holes = holes
        self._blocked = blocked

    async def connect(self, address: PeerAddress, timeout_s: float) -> ConnectedPeer:
        """Link to a peer, directly where possible. Idempotent. Raises Unreachable."""
        peer, own = address.peer, str(self._host.get_id())
        if peer in self._blocked or peer == own:
            raise Unreachable(f"{peer} is {'this peer' if peer == own else 'blocked'}")
        if not self._streams.has_direct_link(peer):
            direct = [text for text in self._gate.choose(address.addresses) if "p2p-circuit" not in text]
            with trio.move_on_after(timeout_s):
                with self._gate.opened(direct):
                    await self._dial(peer, direct[: limits.PEER_ADDRESSES_MAX])
                if self._holes is not None and not self._streams.has_direct_link(peer):
                    await self._call(self._holes, address)
        if not self._streams.links(peer):
            raise Unreachable(
                f"{peer}: no peer with this key answers at {', '.join(address.addresses) or 'no address'}"
            )
        return ConnectedPeer(peer, is_relayed=not self._streams.has_direct_link(peer))

    async def stay_linked(self, peer: KeyId, staying: Mapping[KeyId, PeerAddress]) -> NoReturn:
        """Dial a bootstrap peer at its current address in `staying` whenever there is no link to it."""
        reason = ""
        while True:
            try:
                await self.connect(staying[peer], DIAL_S_MAX)
                reason = ""
            except Unreachable as error:
                if str(error) != reason:
                    log.warning("bootstrap peer %s; trying again every %.0f s", error, DIAL_AGAIN_S)
                reason = str(error)
            await trio.sleep(DIAL_AGAIN_S)

    async def _call(self, holes: Holes, address: PeerAddress) -> None:
        """Link over a relay, and from there directly if a hole can be punched."""
        if self._streams.links(address.peer):
            await holes.punch(address.peer)
            return
        for text in circuits(address):
            if await holes.call(address.peer, text):
                return

    async def _dial(self, peer: KeyId, addresses: Sequence[str]) -> None:
        """Dial one address after the other, the next one in parallel if the last is slow; the first success wins."""
        swarm = self._host.get_network()

        async def attempt(text: str, failed: trio.Event) -> None:
            try:
                await swarm.dial_addr(Multiaddr(text), ID.from_string(peer))
                nursery.cancel_scope.cancel()
            except Exception as error:  # noqa: BLE001 - libp2p raises many kinds; the next address is tried
                faults.note(log, f"{peer} at {text}", error)
            finally:
                failed.set()

        async with trio.open_nursery() as nursery:
            for text in addresses:
                failed = trio.Event()
                nursery.start_soon(attempt, text, failed)
                with trio.move_on_after(DIAL_NEXT_S):
                    await failed.wait()
