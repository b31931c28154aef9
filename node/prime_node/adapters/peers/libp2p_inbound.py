"""Inbound links of a libp2p host, on the trio side: a share of them for each network, and few in their handshake.

The library gives the place of an inbound link back when the host ends, not when the link does: a host that had as many as it
may hold was unreachable from then on. It bounds no handshakes, and no links of one network. A full host refuses all, and dials
no one either.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import trio
from libp2p.abc import IMuxedConn, INetworkService
from libp2p.io.abc import ReadWriteCloser
from libp2p.network.connection.raw_connection import RawConnection
from multiaddr import Multiaddr

from prime_node.adapters.peers import faults
from prime_node.fair_places import to_end
from prime_protocol import limits
from prime_protocol.addresses import network_of

log = logging.getLogger(__name__)


class InboundLinks:
    """The links that others have dialled."""

    def __init__(self, swarm: INetworkService, connections_max: int) -> None:
        self._swarm = swarm
        self._share = max(1, connections_max * limits.PEER_CONNECTIONS_NETWORK_MAX // limits.PEER_CONNECTIONS_MAX)
        self._places = max(1, connections_max * limits.PEER_CONNECTIONS_INBOUND_MAX // limits.PEER_CONNECTIONS_MAX)
        self._links: dict[trio.CancelScope, str] = {}
        """Network of each link, the oldest first, without those in their handshake."""
        self._shaking: dict[RawConnection, str] = {}
        """Network of each handshake in progress, the oldest first."""

    async def take(self, stream: ReadWriteCloser, listening: Multiaddr) -> None:
        """Serve a new connection until it ends. Its caller closes the socket."""
        conn = RawConnection(stream, False)
        network = network_of(_host_at(stream))
        if self._is_full(network):
            return
        try:
            link = await self._shake_hands(conn, listening, network)
            if self._is_full(network) or not self._find_place(network):
                return
            with trio.CancelScope() as served:
                self._links[served] = network
                try:
                    await link.event_closed.wait()
                finally:
                    self._links.pop(served, None)
        except Exception as error:  # noqa: BLE001 - the edge of the task: whatever it was, this connection alone ends
            faults.note(log, "an inbound connection", error)

    def _is_full(self, network: str) -> bool:
        return sum(one == network for one in self._links.values()) >= self._share

    def _find_place(self, network: str) -> bool:
        """Return whether there is a place for one more link, after ending one of the network with most if need be.

        It waits for nothing: a link that is closed in order waits until its other side reads, and newcomers would find its place.
        """
        if len(self._links) < self._places:
            return True
        served = to_end(self._links, network)
        if served is None:
            return False
        del self._links[served]
        served.cancel()
        return True

    async def _shake_hands(self, conn: RawConnection, listening: Multiaddr, network: str) -> IMuxedConn:
        """Return the link. Raises exceptions of the library, also if its place went to a newer one."""
        await self._make_room(network)
        self._shaking[conn] = network
        try:
            return await self._swarm.upgrade_inbound_raw_conn(conn, listening)
        finally:
            self._shaking.pop(conn, None)

    async def _make_room(self, network: str) -> None:
        """End the oldest handshake of this network, or of the one with most of them: an honest one takes moments.

        Its socket is closed: the library never gives the place of a cancelled handshake back.
        """
        counts = Counter(self._shaking.values())
        if counts[network] < limits.PEER_HANDSHAKES_NETWORK_MAX:
            if counts.total() < limits.PEER_HANDSHAKES_MAX:
                return
            [(network, _)] = counts.most_common(1)
        oldest = next(conn for conn, one in self._shaking.items() if one == network)
        del self._shaking[oldest]
        await oldest.close()


def _host_at(stream: Any) -> str:
    """Return the IP address of a socket's other end; empty if it has closed. The library's own function knows IPv4 alone."""
    try:
        return str(stream.stream.socket.getpeername()[0])
    except OSError:
        return ""
