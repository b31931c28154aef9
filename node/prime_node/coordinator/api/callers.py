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


class Callers:
    """Example: Callers(proxies=config.behind, trusted=config.trusted)."""

    def __init__(self, *, proxies: Networks, trusted: Networks) -> None:
        self._proxies = proxies
        self._trusted = trusted
        self._has_warned = False

    def address_of(self, request: Request) -> str:
        """The last address on the way that is no proxy of ours."""
        address, hops = request.remote, request.headers.get(HEADER, "").split(",")[-HOPS_MAX:]
        if hops == [""]:
            return address
        while hops and is_in(address, self._proxies):
            address = without_port(printable(hops.pop().strip(), 64))
        is_named = is_in(request.remote, self._proxies)
        if not (is_named or self._has_warned) and is_in(address, self._trusted):
            self._has_warned = True
            log.warning(
                "a request from %s says that it was made for somebody else: if that is a reverse proxy, name it in "
                "coordinator.proxies; until then everybody behind it counts as your own, without limits by network",
                address,
            )
        return address


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
