"""A relay's reservations and circuits, on the trio side: each for the key of the link that asks, with a share for each network.

The library reserves for any peer that a message names, so that one link could use up all places for an hour. It ends no silent
circuit, counts circuits by their target alone, and ends another circuit to a target together with one that ends. And it
takes circuits from any peer, so that one link could bring any number of keys.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection

import trio
from libp2p.abc import IHost, INetStream
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.protocol_buffer import StatusCode
from libp2p.relay.circuit_v2.resources import RelayLimits, RelayResourceManager

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_streams import reset
from prime_node.fair_places import has_place, to_end
from prime_protocol import limits
from prime_protocol.addresses import network_of
from prime_protocol.identity import KeyId

log = logging.getLogger(__name__)

CIRCUIT_READ_BYTES = 2**16
PLACE_S_MIN = 10.0
"""Seconds for which a circuit takes its place at least: the peer that is called asks a relay about each caller for as long."""

HostsOf = Callable[[KeyId], Collection[str]]
"""Function that returns the IP addresses at which a peer's direct links end."""


def network_at(hosts: Collection[str]) -> str:
    """Return the network that a peer with links from these IP addresses counts in. All peers without any count as one."""
    return network_of(next(iter(hosts), ""))


class Relay(CircuitV2Protocol):
    """One host's circuits, as a relay if `serves`, and as a peer that is called."""

    def __init__(
        self, host: IHost, bounds: RelayLimits, hosts_of: HostsOf, *, serves: bool, is_ours: Callable[[KeyId], bool]
    ) -> None:
        """Make the circuits of a host. `is_ours` returns whether the host has a reservation at a relay."""
        super().__init__(host, limits=bounds, allow_hop=serves)
        self.resource_manager = Reservations(host, bounds, hosts_of)
        self._hosts_of = hosts_of
        self._is_ours = is_ours
        self._open: Counter[tuple[str, ID]] = Counter()
        """Circuits by the network of the peer that asked and the peer that is called."""

    async def _handle_reserve(self, stream: INetStream, msg: HopMessage) -> None:
        msg.ClearField("peer")  # without it, the library reserves for the key of the link
        await super()._handle_reserve(stream, msg)

    async def _handle_connect(self, stream: INetStream, msg: HopMessage) -> None:
        source, target = stream.muxed_conn.peer_id, ID(msg.peer.id)
        network = network_at(self._hosts_of(str(source)))
        if not self._has_room(network, target):
            await self._send_status(stream, StatusCode.RESOURCE_LIMIT_EXCEEDED, "too many circuits")
            return
        self._open[network, target] += 1
        began_s = trio.current_time()
        try:
            await super()._handle_connect(stream, msg)
            await trio.sleep_until(began_s + PLACE_S_MIN)
        finally:
            self._open[network, target] -= 1
            self._open += Counter()  # drop what is zero
            for one in (source, target):
                self._active_relays.pop(one, None)

    def _has_room(self, network: str, target: ID) -> bool:
        """Return whether one more circuit fits: in all, to the target, and in the network's shares of both."""
        of_network = sum(count for (near, _), count in self._open.items() if near == network)
        to_target = sum(count for (_, peer), count in self._open.items() if peer == target)
        of_both, all_most, target_most = self._open[network, target], limits.RELAY_CIRCUITS_MAX, limits.RELAY_TARGET_MAX
        return has_place(of_network, self._open.total(), most=all_most, share=limits.RELAY_NETWORK_MAX) and has_place(
            of_both, to_target, most=target_most, share=limits.RELAY_TARGET_NETWORK_MAX
        )

    async def _relay_data(
        self,
        src_stream: INetStream,
        dst_stream: INetStream,
        peer_id: ID,
        deadline: float | None = None,
        circuit_data_limit: list[int] | None = None,
    ) -> None:
        """Pass on one direction of a circuit. Its end ends the other direction, and no other circuit."""
        left = circuit_data_limit or [self.limits.data]
        circuit = trio.lowlevel.current_task().parent_nursery
        assert circuit is not None
        with trio.move_on_after(self.limits.duration if deadline is None else max(0.0, deadline - time.monotonic())):
            try:
                while (data := await src_stream.read(CIRCUIT_READ_BYTES)) and len(data) <= left[0]:
                    left[0] -= len(data)
                    with trio.fail_after(self.write_timeout):
                        await dst_stream.write(data)
            except Exception as error:  # noqa: BLE001 - libp2p raises many kinds: the circuit has ended
                faults.note(log, "a circuit", error)
            finally:
                circuit.cancel_scope.cancel()
                for stream in (src_stream, dst_stream):
                    await reset(stream)

    async def _handle_stop_stream(self, stream: INetStream) -> None:
        if self._is_ours(str(stream.muxed_conn.peer_id)):
            await super()._handle_stop_stream(stream)
        else:
            await reset(stream)


class Reservations(RelayResourceManager):
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
        if not super().can_accept_reservation(peer_id):
            networks = {one: self._network(one) for one in self._reservations}
            if (ended := to_end(networks, self._network(peer_id))) is not None:
                del self._reservations[ended]
        return self._has_room(peer_id)

    def _has_room(self, peer: ID) -> bool:
        network = self._network(peer)
        others = [one for one in self._reservations if self._network(one) == network and one != peer]
        has_room: bool = super().can_accept_reservation(peer)
        return has_room and len(others) < limits.RELAY_NETWORK_MAX

    def _network(self, peer: ID) -> str:
        return network_at(self._hosts_of(str(peer)))
