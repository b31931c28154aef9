"""A relay's reservations, on the trio side: each for the key of the link that asks, with a share for each network.

The library reserves for any peer that a message names, so that one link could use up all places for an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from libp2p.abc import IHost, INetStream
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits, RelayResourceManager

from prime_protocol import limits
from prime_protocol.addresses import network_of
from prime_protocol.identity import KeyId

HostsOf = Callable[[KeyId], Collection[str]]
"""Function that returns the IP addresses at which a peer's direct links end."""


def network_at(hosts: Collection[str]) -> str:
    """Return the network that a peer with links from these IP addresses counts in. All peers without any count as one."""
    return network_of(next(iter(hosts), ""))


class Relay(CircuitV2Protocol):  # type: ignore[misc]
    """One host's circuits, as a relay if `serves`, and as a peer that is called."""

    def __init__(self, host: IHost, bounds: RelayLimits, hosts_of: HostsOf, *, serves: bool) -> None:
        super().__init__(host, limits=bounds, allow_hop=serves)
        self.resource_manager = Reservations(host, bounds, hosts_of)

    async def _handle_reserve(self, stream: INetStream, msg: HopMessage) -> None:
        msg.ClearField("peer")  # without it, the library reserves for the key of the link
        await super()._handle_reserve(stream, msg)


class Reservations(RelayResourceManager):  # type: ignore[misc]
    """Reservations by peer. Those of peers without a link make room for others."""

    def __init__(self, host: IHost, bounds: RelayLimits, hosts_of: HostsOf) -> None:
        super().__init__(bounds, host)
        self._hosts_of = hosts_of

    def can_accept_reservation(self, peer_id: ID) -> bool:
        """Return whether there is room for a peer: altogether, and in its network's share."""
        if self._has_room(peer_id):
            return True
        for one in [one for one in self._reservations if not self._is_peer_connected(one)]:
            del self._reservations[one]
        return self._has_room(peer_id)

    def _has_room(self, peer: ID) -> bool:
        network = network_at(self._hosts_of(str(peer)))
        others = [one for one in self._reservations if network_at(self._hosts_of(str(one))) == network and one != peer]
        has_room: bool = super().can_accept_reservation(peer)
        return has_room and len(others) < limits.RELAY_NETWORK_MAX
