"""Whose address a request counts against: the caller's, also where a reverse proxy stands in between.

A proxy writes the address that it was called from at the end of X-Forwarded-For. What stands before that anybody may have
written, so the header is read from its end, and only as long as it is a proxy of ours that speaks.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence

from prime_node.ports.web import Request
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

Networks = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
HEADER = "x-forwarded-for"
HOPS_MAX = 8
"""Proxies in a row."""
PREFIX_BITS = {4: 24, 6: 48}
"""What one owner of addresses usually has, by the version of IP."""


class Callers:
    """Example: Callers(proxies=config.behind, trusted=config.trusted)."""

    def __init__(self, *, proxies: Networks, trusted: Networks) -> None:
        self._proxies = proxies
        self._trusted = trusted
        self._has_warned = False

    def address_of(self, request: Request) -> str:
        """The last address on the way that is no proxy of ours."""
        return self.address(request.remote, request.headers.get(HEADER, ""))

    def address(self, remote: str, forwarded: str) -> str:
        """The same, from the connection's address and the value of X-Forwarded-For."""
        address, hops = remote, forwarded.split(",")[-HOPS_MAX:]
        if hops == [""]:
            return address
        while hops and is_in(address, self._proxies):
            address = without_port(printable(hops.pop().strip(), 64))
        is_named = is_in(remote, self._proxies)
        if not (is_named or self._has_warned) and is_in(address, self._trusted):
            self._has_warned = True
            log.warning(
                "a request from %s says that it was made for somebody else: if that is a reverse proxy, name it in "
                "coordinator.proxies; until then everybody behind it counts as your own, without limits by network",
                address,
            )
        return address

    def network_of(self, address: str) -> str:
        """The network that shares its bounds: /24 or /48, but a single address where the operator trusts its network."""
        return address if self.is_trusted(address) else prefix_of(address)

    def is_trusted(self, address: str) -> bool:
        """Is it in a network of the operator's own?"""
        return is_in(address, self._trusted)

    def is_proxy(self, address: str) -> bool:
        """Is it a reverse proxy of the operator's own?"""
        return is_in(address, self._proxies)


def prefix_of(address: str) -> str:
    """The network of an address, as its owner usually has it. What is no address is one network."""
    found = parsed(address)
    if found is None:
        return "unknown"
    return str(ipaddress.ip_network((found, PREFIX_BITS[found.version]), strict=False))


def is_in(address: str, networks: Networks) -> bool:
    """False for what is no address."""
    found = parsed(address)
    return found is not None and any(found in network for network in networks)


def without_port(address: str) -> str:
    """Some proxies write the caller's port too: 192.0.2.1:4711, [2001:db8::1]:4711."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for what is no address. IPv4 inside IPv6 is IPv4."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found
