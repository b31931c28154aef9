"""The last check before a libp2p host dials: only addresses that our own code requested, none in foreign private networks.

The library also dials by itself: the DHT dials peers that strangers name, Identify and hole punching dial what a peer says of
itself. Our host dials only the endpoints for which `opened` holds the gate open at that moment.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from libp2p.abc import IHost
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from prime_node.adapters.peers.own_addresses import own_addresses
from prime_protocol import limits
from prime_protocol.addresses import GLOBAL, Endpoint, endpoint_of, place_of

log = logging.getLogger(__name__)

ANY_PORT = 0


class ConnectionGater:
    """Gate of one host. Used on the trio side only."""

    def __init__(self, near: Iterable[str] = ()) -> None:
        """Make a closed gate.

        `near` are IP addresses that the machine's owner configured: where it listens, its bootstrap peers, the coordinator.
        Their networks may be dialled, and those that this machine is in. Loopback may be dialled only if one of them is
        there.
        """
        self._places = {GLOBAL, *map(place_of, near), *map(place_of, own_addresses())} - {None}
        self._open: Counter[tuple[str, int]] = Counter()

    def allows(self, end: Endpoint) -> bool:
        """Return whether an address may be dialled at all."""
        return place_of(end.host) in self._places

    def choose(self, addresses: Iterable[str]) -> list[str]:
        """Return the addresses that may be dialled at all. DNS names may not."""
        return [text for text in addresses if (end := endpoint_of(text)) is not None and self.allows(end)]

    def choose_hints(self, addresses: Iterable[str], near: Collection[str]) -> list[str]:
        """Return the dialable ones of unsigned addresses: those on the internet, and in networks that a linked host is in."""
        places = {GLOBAL, *map(place_of, near)}
        return [text for text in self.choose(addresses) if (end := endpoint_of(text)) and place_of(end.host) in places]

    @contextlib.contextmanager
    def opened(self, addresses: Iterable[str] = (), *, hosts: Iterable[str] = ()) -> Iterator[None]:
        """Let the host dial these addresses, and these hosts on any port, while the context is open."""
        ends = [end for address in self.choose(addresses) if (end := endpoint_of(address)) is not None]
        ends += [end for host in hosts if self.allows(end := Endpoint(host, ANY_PORT))]
        held = Counter((end.host, end.port) for end in ends)
        self._open.update(held)
        try:
            yield
        finally:
            self._open -= held

    def guard(self, host: IHost) -> None:
        """Put the gate in front of every transport of a host."""
        manager = host.get_network().transport_manager
        find: Callable[[Multiaddr], Any] = manager.transport_for_dialing

        def transport_for_dialing(address: Multiaddr) -> Any:
            text = str(address)
            end = endpoint_of(text if text.endswith("/p2p-circuit") else text.split("/p2p/")[0])
            if end is None or not self._is_open(end):
                log.debug("not dialled: %s", text)
                return None  # to the library: an address that no transport can dial
            return find(address)

        manager.transport_for_dialing = transport_for_dialing

    def guard_announced_addresses(
        self, host: IHost, links_of: Callable[[str], Collection[str]]
    ) -> Callable[[str, Any], list[Any]]:
        """Restrict the addresses that a host stores about peers, and so passes on, to those that their links come from.

        `links_of` returns the IP addresses at which a peer's direct links end. Return the filter: (key id, multiaddrs) ->
        multiaddrs.
        """
        store = host.get_peerstore()
        add = store.add_addrs

        def proven(peer: str, addresses: Any) -> list[Any]:
            hosts = links_of(peer)
            few = itertools.islice(addresses, limits.PEER_ADDRESSES_MAX)  # honest peers name no more
            ends = [(address, endpoint_of(str(address).split("/p2p/")[0])) for address in few]
            return [one for one, end in ends if end is not None and (end.host in hosts or self._is_open(end))]

        def add_addrs(peer: ID, addresses: Any, ttl: int = 0) -> None:
            add(peer, proven(str(peer), addresses), ttl)

        store.add_addrs = add_addrs
        return proven

    def _is_open(self, end: Endpoint) -> bool:
        return (end.host, end.port) in self._open or (end.host, ANY_PORT) in self._open
