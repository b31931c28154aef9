"""The last look before a libp2p host dials: only what our own code has asked for, and never an address that leads elsewhere.

The library dials by itself: the table of hints dials whom strangers name, Identify and hole punching what a peer says of itself.
A host of ours dials nothing but the endpoints for which `opened` holds the gate open at that moment.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from libp2p.abc import IHost
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from prime_node.adapters.peers.own_addresses import own_addresses
from prime_protocol.addresses import GLOBAL, Endpoint, endpoint_of, place_of

log = logging.getLogger(__name__)

ANY_PORT = 0


class ConnectionGater:
    """One host's. Used on the trio side only."""

    def __init__(self, near: Iterable[str] = ()) -> None:
        """`near`: IP addresses that the machine's owner leads us to: where it listens, its bootstrap peers, the coordinator.
        Their networks may be dialled, and those that this machine is in. Loopback may be dialled only where one of them is
        there."""
        self._places = {GLOBAL, *map(place_of, near), *map(place_of, own_addresses())} - {None}
        self._open: Counter[tuple[str, int]] = Counter()

    def allows(self, end: Endpoint) -> bool:
        """Whether an address may be dialled at all."""
        return place_of(end.host) in self._places

    def choose(self, addresses: Iterable[str]) -> list[str]:
        """Those that may be dialled at all. Names (DNS) may not."""
        return [text for text in addresses if (end := endpoint_of(text)) is not None and self.allows(end)]

    def choose_hints(self, addresses: Iterable[str], near: Collection[str]) -> list[str]:
        """Of addresses for which no coordinator vouches, those of the internet, and of networks that a linked host is in."""
        places = {GLOBAL, *map(place_of, near)}
        return [text for text in self.choose(addresses) if (end := endpoint_of(text)) and place_of(end.host) in places]

    @contextlib.contextmanager
    def opened(self, addresses: Iterable[str] = (), *, hosts: Iterable[str] = ()) -> Iterator[None]:
        """Let the host dial these addresses, and these hosts on any port, meanwhile."""
        ends = [end for address in self.choose(addresses) if (end := endpoint_of(address)) is not None]
        ends += [end for host in hosts if self.allows(end := Endpoint(host, ANY_PORT))]
        held = Counter((end.host, end.port) for end in ends)
        self._open.update(held)
        try:
            yield
        finally:
            self._open -= held

    def guard(self, host: IHost) -> None:
        """Put the gate before every transport of a host."""
        manager = host.get_network().transport_manager
        find: Callable[[Multiaddr], Any] = manager.transport_for_dialing

        def transport_for_dialing(address: Multiaddr) -> Any:
            text = str(address)
            end = endpoint_of(text if text.endswith("/p2p-circuit") else text.split("/p2p/")[0])
            if end is None or not self._is_open(end):
                log.debug("not dialled: %s", text)
                return None  # the library takes it for an address that no transport of ours can dial
            return find(address)

        manager.transport_for_dialing = transport_for_dialing

    def guard_what_is_told(
        self, host: IHost, links_of: Callable[[str], Collection[str]]
    ) -> Callable[[str, Any], list[Any]]:
        """Let a host remember, and so tell others, of what peers say of themselves only addresses that their links come from.

        `links_of` gives the IP addresses at which a peer's direct links end. Returns the filter:
        (key id, multiaddrs) -> multiaddrs.
        """
        store = host.get_peerstore()
        add = store.add_addrs

        def proven(peer: str, addresses: Any) -> list[Any]:
            hosts = links_of(peer)
            ends = [(address, endpoint_of(str(address).split("/p2p/")[0])) for address in addresses]
            return [one for one, end in ends if end is not None and (end.host in hosts or self._is_open(end))]

        def add_addrs(peer: ID, addresses: Any, ttl: int = 0) -> None:
            add(peer, proven(str(peer), addresses), ttl)

        store.add_addrs = add_addrs
        return proven

    def _is_open(self, end: Endpoint) -> bool:
        return (end.host, end.port) in self._open or (end.host, ANY_PORT) in self._open
