"""Handling of every new libp2p link, on the trio side."""

from __future__ import annotations

from typing import Any

import trio
from libp2p.abc import INetConn, INetwork
from multiaddr import Multiaddr

from prime_node.adapters.peers.libp2p_hints import Hints
from prime_node.adapters.peers.libp2p_nat import Holes
from prime_node.adapters.peers.libp2p_streams import leads_through_relay
from prime_protocol.identity import KeyId


class Doorkeeper:
    """Observer of new links: it closes those of blocked peers, punches holes for circuits, adds other peers to the hints."""

    def __init__(self, blocked: set[KeyId], hints: Hints, holes: Holes | None, nursery: trio.Nursery) -> None:
        self._blocked = blocked
        self._hints = hints
        self._holes = holes
        self._nursery = nursery

    async def connected(self, network: INetwork, link: INetConn) -> None:
        """Handle a new link."""
        peer = str(link.muxed_conn.peer_id)
        if peer in self._blocked:
            await link.close()
        elif leads_through_relay(link) and self._holes is not None:
            self._nursery.start_soon(self._holes.punch, peer)
        else:
            self._nursery.start_soon(self._hints.meet, peer)

    async def disconnected(self, network: INetwork, link: INetConn) -> None:
        """Allow another punch once a direct link has ended."""
        if self._holes is not None and not leads_through_relay(link):
            self._holes.forget(str(link.muxed_conn.peer_id))

    async def opened_stream(self, network: INetwork, stream: Any) -> None:
        """Do nothing."""
        return

    async def closed_stream(self, network: INetwork, stream: Any) -> None:
        """Do nothing."""
        return

    async def listen(self, network: INetwork, address: Multiaddr) -> None:
        """Do nothing."""
        return

    async def listen_close(self, network: INetwork, address: Multiaddr) -> None:
        """Do nothing."""
        return
