"""NAT traversal, on the trio side: circuits of a relay (circuit v2) and holes punched through them (DCUtR).

A peer behind a NAT has a reservation at a relay. A peer that wants to reach it asks the relay for a circuit. Over that
circuit both agree to dial each other at the same moment, so that either NAT takes the other's packet for an answer. Both dial
only the IP addresses at which the relay sees the other. The side with the lower key id leads. A pair tries once a session,
because a second attempt fails as well: a NAT that gives every connection a port of its own cannot be punched. A circuit
carries short messages, for two minutes; bytes go over a direct link or come from the origin.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio
from libp2p.abc import IHost
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.config import RelayConfig, RelayRole
from libp2p.relay.circuit_v2.dcutr import DCUtRProtocol
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_gate import ConnectionGater
from prime_node.adapters.peers.libp2p_relay import Relay
from prime_node.adapters.peers.libp2p_streams import Streams
from prime_protocol import limits
from prime_protocol.addresses import endpoint_of, may_be_named
from prime_protocol.identity import KeyId

log = logging.getLogger(__name__)

CIRCUIT_S_MAX = 10.0
"""Seconds to get a circuit, or a reservation at a relay."""
PUNCH_S_MAX = 30.0
"""Seconds to punch a hole; the library tries three rounds of five seconds."""


class Holes:
    """Circuits and holes of one host."""

    def __init__(
        self,
        host: IHost,
        streams: Streams,
        nursery: trio.Nursery,
        *,
        serves_as_relay: bool,
        gate: ConnectionGater,
        seen_at: Callable[[KeyId], Awaitable[frozenset[str]]],
    ) -> None:
        """Set up the host's circuits.

        `seen_at` returns the IP addresses that a peer's links come from, according to a relay.
        """
        self._host = host
        self._gate = gate
        self._seen_at = seen_at
        self._nursery = nursery
        self._streams = streams
        roles = RelayRole.STOP | RelayRole.CLIENT | (RelayRole.HOP if serves_as_relay else RelayRole.STOP)
        bounds = RelayLimits(
            duration=limits.RELAY_CIRCUIT_S_MAX,
            data=limits.RELAY_CIRCUIT_BYTES_MAX,
            max_circuit_conns=limits.RELAY_CIRCUITS_MAX,
            max_reservations=limits.RELAY_CIRCUITS_MAX,
        )
        self._reserved: set[KeyId] = set()
        """Relays with a reservation of this host."""
        self._relay = Relay(host, bounds, streams.hosts, serves=serves_as_relay, is_ours=self._reserved.__contains__)
        self._circuits = CircuitV2Transport(host, self._relay, RelayConfig(roles=roles, limits=bounds))
        self.punching = _Punching(_AsItListens(host))
        self.punching.gate = gate
        self.punching.relay_hosts = streams.all_hosts
        host._dcutr_protocol = self.punching  # how the library registers it on its host
        self._tried: dict[KeyId, trio.Event] = {}
        self.num_punched = 0

    @property
    def num_tried(self) -> int:
        """Number of peers with a finished attempt."""
        return sum(tried.is_set() for tried in self._tried.values())

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Run the relay and hole-punching services while the context is open."""
        async with background_trio_service(self._relay), background_trio_service(self.punching):
            await self.punching.event_started.wait()
            yield

    async def reserve(self, relay: KeyId) -> bool:
        """Make a reservation at a linked relay, renewed until the host ends. Return False if it refuses."""
        try:
            with trio.fail_after(CIRCUIT_S_MAX):
                stream = await self._host.new_stream(ID.from_string(relay), [HOP])
                kept: bool = await self._circuits.reserve(stream, ID.from_string(relay), self._nursery)
                await stream.close()
                if kept:
                    self._reserved.add(relay)
                return kept
        except Exception as error:  # noqa: BLE001 - libp2p raises many kinds: it is no relay, or a full one
            faults.note(log, f"no reservation at relay {relay}", error)
            return False

    async def call(self, peer: KeyId, address: str) -> bool:
        """Ask the relay in `address` for a circuit to a peer, and punch. Return whether there is any link then."""
        try:
            with trio.fail_after(CIRCUIT_S_MAX), self._gate.opened((address,)):
                await self._circuits.dial(Multiaddr(f"{address}/p2p/{peer}"))
        except Exception as error:  # noqa: BLE001 - libp2p raises many kinds: no reservation, no relay, no circuit left
            faults.note(log, f"no circuit to {peer} over {address}", error)
            return False
        await self.punch(peer)
        return True

    async def punch(self, peer: KeyId) -> None:
        """Wait for the one attempt of this session to turn a circuit into a direct link; the first call starts it.

        Return at once while too many others are being tried.
        """
        if peer not in self._tried:
            if len(self._tried) - self.num_tried >= limits.RELAY_TARGET_MAX:
                return
            while len(self._tried) >= limits.KNOWN_PEERS_MAX:
                del self._tried[next(one for one, tried in self._tried.items() if tried.is_set())]
            self._tried[peer] = trio.Event()
            self._nursery.start_soon(self._try, peer, self._tried[peer])
        await self._tried[peer].wait()

    async def _try(self, peer: KeyId, tried: trio.Event) -> None:
        started_s = time.monotonic()
        seen = self.punching.seen[peer] = _Seen()
        try:
            with trio.move_on_after(PUNCH_S_MAX):
                seen.hosts = await self._seen_at(peer)
                seen.is_known.set()
                if not seen.hosts:
                    log.debug("no relay knows the address of %s: hole punching is left out", peer)
                elif self._host.get_id().to_string() < peer:
                    await self.punching.initiate_hole_punch(ID.from_string(peer))
                else:
                    await self._wait_for_direct_link(peer)
        except Exception as error:  # noqa: BLE001 - libp2p raises many kinds: no hole, and nothing else
            faults.note(log, f"hole punching with {peer}", error)
        finally:
            punched = self._streams.has_direct_link(peer)
            self.num_punched += punched
            self.punching.seen.pop(peer, None)
            tried.set()
        outcome = "a direct link" if punched else "no direct link"
        log.info("hole punching with %s: %s after %.1f s", peer, outcome, time.monotonic() - started_s)

    async def _wait_for_direct_link(self, peer: KeyId) -> None:
        while not self._streams.has_direct_link(peer) and self._streams.links(peer):  # noqa: ASYNC110 - the library does not signal it
            await trio.sleep(0.1)

    def forget(self, peer: KeyId) -> None:
        """Allow another attempt after a direct link broke."""
        tried = self._tried.get(peer)
        if tried is not None and tried.is_set():
            del self._tried[peer]


@dataclass
class _Seen:
    """Addresses at which a relay sees a peer."""

    hosts: frozenset[str] = frozenset()
    is_known: trio.Event = field(default_factory=trio.Event)


class _Punching(DCUtRProtocol):
    """A hole puncher that dials only addresses at which a relay sees the peer, by TCP alone.

    The library's own dials whatever the other peer names, by TCP and by a stream of UDP packets. This one also sends the peer
    no address inside a home network.
    """

    gate: ConnectionGater
    relay_hosts: Callable[[], frozenset[str]]

    def __init__(self, host: Any) -> None:
        super().__init__(host)
        self.seen: dict[KeyId, _Seen] = {}
        """Peers that a hole is being punched to."""

    async def _auto_drive_loop(self) -> None:
        """Sleep: the library's own loop would try each pair three times, from both sides."""
        await trio.sleep_forever()

    async def _try_unilateral_upgrade(self, peer_id: ID) -> bool:
        """Do nothing: the library's own dials what Identify reported, and listed addresses were dialled before."""
        return False

    async def _spam_udp_for_hole_punch(self, addr: Multiaddr, stop: trio.Event) -> None:
        """Do nothing: this is for QUIC, which we do not use, and the address may be a victim's."""

    async def _perform_hole_punch(self, peer_id: ID, addrs: list[Multiaddr], as_responder: bool = False) -> bool:
        seen = self.seen.get(str(peer_id))
        if seen is None:
            return False
        with trio.move_on_after(CIRCUIT_S_MAX):
            await seen.is_known.wait()
        wanted = [one for one in addrs if (end := endpoint_of(str(one))) is not None and end.host in seen.hosts]
        if not wanted:
            log.debug("%s is observed at none of the addresses that it announces", peer_id)
            return False
        with self.gate.opened(map(str, wanted)):
            punched: bool = await super()._perform_hole_punch(
                peer_id, wanted[: limits.PEER_ADDRESSES_MAX], as_responder
            )
        return punched

    async def _get_observed_addrs(self) -> list[bytes]:
        near = self.relay_hosts()
        return [
            one
            for one in await super()._get_observed_addrs()
            if (end := endpoint_of(str(Multiaddr(one)))) is not None and near and may_be_named(end.host, between=near)
        ]


class _AsItListens:
    """The host as hole punching sees it: with its listening address, which Identify does not reveal to all."""

    def __init__(self, host: IHost) -> None:
        self._host = host

    def get_addrs(self) -> list[Multiaddr]:
        return list(self._host.get_transport_addrs())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)
