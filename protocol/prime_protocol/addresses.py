"""Rules for which addresses a peer may pass on to which peer, and which it may dial. SPEC.md, section "Addresses".

A public address leads to the same machine from everywhere. Any other address leads to a different machine in every
network. So a peer passes it on only inside the place where it was learned, and dials it only if a peer in that place
named it. Some addresses lead to services of a machine's own host (cloud metadata), to many machines, or to none. They
are never passed on or dialled.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

GLOBAL, LOOPBACK = "global", "loopback"
ULA_PREFIX_BITS = 48
"""Prefix length of one site's unique local addresses (RFC 4193)."""

REMEMBERED = 4_096
"""Addresses whose meaning is cached: a list of peers names the same ones again and again."""
NETWORK_BITS = {4: 24, 6: 48}
"""Prefix length that one owner of addresses usually has, by IP version."""

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_PLACES = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),  # private (RFC 1918)
        "100.64.0.0/10",  # behind a provider's NAT (RFC 6598)
        "169.254.0.0/16",  # link-local (RFC 3927)
        *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24", "2001:db8::/32", "3fff::/20"),  # documentation
        *("198.18.0.0/15", "2001:2::/48"),  # measurements (RFC 2544, RFC 5180)
    )
)
"""Networks whose addresses are meaningful only inside them."""
_UNICAST = ipaddress.ip_network("2000::/3")
"""Allocated part of IPv6: no address outside leads anywhere on the public internet."""
_ULA = ipaddress.ip_network("fc00::/7")
_NOWHERE = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("169.254.169.0/24", "169.254.170.0/24", "fd00:ec2::/32", "fd20:ce::/32"),  # metadata of AWS, Azure and Google
        *("100.100.100.200/32", "168.63.129.16/32", "192.0.0.0/24"),  # metadata of Alibaba, Azure and Oracle
        *("2002::/16", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "192.88.99.0/24"),  # contain an IPv4 address
    )
)
"""Networks that no peer is directed to, wherever their addresses were learned."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Destination of a TCP connection. Example: Endpoint("203.0.113.7", 4001)."""

    host: str
    """IP address in its canonical form."""
    port: int
    relay: str = ""
    """Key id of the relay at this endpoint, if the address is a circuit address."""


def parse_ip(text: str) -> IPAddress | None:
    """Parse an IP address. Return None for anything else, including zones (fe80::1%eth0).

    IPv4 inside IPv6 (::ffff:1.2.3.4) becomes IPv4.
    """
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    return None if found.scope_id else found.ipv4_mapped or found


def is_name(host: str) -> bool:
    """Return whether a host can be a name: neither an IP address nor another spelling of one, such as 127.1 or 127.0.0.1."""
    return parse_ip(host) is None and not host.rstrip(".").rpartition(".")[2][:1].isdigit()


@lru_cache(REMEMBERED)
def place_of(host: str) -> str | None:
    """Return the network inside which an IP address identifies one machine: GLOBAL, LOOPBACK, or a network.

    None for an address that is never given to peers. Example: "192.168.0.0/16" for "192.168.1.7".
    """
    address = parse_ip(host)
    if address is None or any(address in network for network in _NOWHERE):
        return None
    if address.is_loopback:
        return LOOPBACK
    for network in _PLACES:
        if address in network:
            return str(network)
    if address in _ULA:
        return str(ipaddress.ip_network((address, ULA_PREFIX_BITS), strict=False))
    is_unicast = address.is_global and not address.is_multicast
    return GLOBAL if is_unicast and (address.version == 4 or address in _UNICAST) else None


def network_of(host: str) -> str:
    """Return the network whose keys share one limit at a peer: /24 of IPv4, /48 of IPv6.

    A non-public IPv4 address counts alone, because one household has many of them. All invalid addresses count as one
    network.
    """
    address = parse_ip(host)
    if address is None:
        return "unknown"
    if address.version == 4 and place_of(host) != GLOBAL:
        return str(address)
    return usual_network(address)


def usual_network(address: IPAddress) -> str:
    """Return the network of the addresses that one owner usually has. Example: "203.0.113.0/24" for 203.0.113.7."""
    return str(ipaddress.ip_network((address, NETWORK_BITS[address.version]), strict=False))


def may_be_named(host: str, *, between: Iterable[str]) -> bool:
    """Return whether an address leads to the same machine for all given hosts.

    The hosts are the client that receives it, or the coordinator that reported it. A host on loopback shares this
    machine, and therefore all its networks.
    """
    place = place_of(host)
    if place is None or place == GLOBAL:
        return place == GLOBAL
    return {place_of(one) for one in between} in ({place}, {LOOPBACK})


@lru_cache(REMEMBERED)
def endpoint_of(address: str) -> Endpoint | None:
    """Return the endpoint of an HTTP address or a TCP multiaddr, including circuit addresses.

    None for anything else, including DNS names.
    """
    if address.startswith("http://"):
        try:
            url = urlsplit(address)
            return _endpoint(url.hostname or "", str(url.port or ""), "")
        except ValueError:
            return None
    parts = address.split("/")
    relay = ""
    if len(parts) == 8 and (parts[5], parts[7]) == ("p2p", "p2p-circuit"):
        relay = parts[6]
        parts = parts[:5]
    if len(parts) != 5 or parts[0] or parts[3] != "tcp" or parts[1] not in ("ip4", "ip6"):
        return None
    found = parse_ip(parts[2])
    is_spelled_right = found is not None and (":" in parts[2]) == (parts[1] == "ip6")
    return _endpoint(parts[2], parts[4], relay) if is_spelled_right else None


def _endpoint(host: str, port: str, relay: str) -> Endpoint | None:
    address = parse_ip(host)
    is_number = port.isascii() and port.isdigit() and len(port) <= 5
    if address is None or not is_number or not 0 < int(port) < 2**16:
        return None
    return Endpoint(str(address), int(port), relay)
