"""The caller's address that a request counts against, also behind a reverse proxy, and the limits by address.

A proxy appends the address of its caller to X-Forwarded-For. A client can forge the entries before that. So the header is read
from its end, only as long as the entries come from trusted proxies.

The limits for strangers count by these addresses, and the accepted host names depend on them (ports/web.py). The operator may
list more names, and the operator's own proxies decide for themselves.
"""

from __future__ import annotations

import ipaddress
import logging
import math
from collections.abc import Sequence
from functools import lru_cache

from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.web import CallerBounds, Request, is_own_host, parsed
from prime_protocol.addresses import usual_network
from prime_protocol.visible import printable

log = logging.getLogger(__name__)

Networks = Sequence[ipaddress.IPv4Network | ipaddress.IPv6Network]
HEADER = "x-forwarded-for"
HOPS_MAX = 8
"""Number of proxies in a row."""
MEMBER_REQUESTS_TIMES = 4
"""Limit on a member's requests, the unsigned ones included, as a multiple of its rate of signed ones."""


class Callers:
    """Addresses of callers. Example: Callers(proxies=config.behind, trusted=config.trusted)."""

    def __init__(self, *, proxies: Networks, trusted: Networks) -> None:
        self._proxies = proxies
        self._trusted = trusted
        self._has_warned = False

    def address_of(self, request: Request) -> str:
        """Return the last address on the path that is not a trusted proxy."""
        return self.address(request.remote, request.headers.get(HEADER, ""))

    def address(self, remote: str, forwarded: str) -> str:
        """Return the same from the connection's address and the value of X-Forwarded-For."""
        address, hops = remote, forwarded.split(",")[-HOPS_MAX:]
        if hops == [""]:
            return address
        while hops and is_in(address, self._proxies):
            address = without_port(printable(hops.pop().strip(), 64))
        is_named = is_in(remote, self._proxies)
        if not (is_named or self._has_warned) and is_in(address, self._trusted):
            self._has_warned = True
            log.warning(
                "a request from %s has the header X-Forwarded-For: if it is your reverse proxy, add it to coordinator.proxies; "
                "until then all its callers count as your own, without limits by network",
                address,
            )
        return address

    def network_of(self, address: str) -> str:
        """Return the network that the address shares limits with: /24 or /48, or the address alone in a trusted network."""
        return address if self.is_trusted(address) else prefix_of(address)

    def is_trusted(self, address: str) -> bool:
        """Return whether the address is in a network that the operator trusts."""
        return is_in(address, self._trusted)

    def is_proxy(self, address: str) -> bool:
        """Return whether the address is one of the operator's reverse proxies."""
        return is_in(address, self._proxies)


@lru_cache(4_096)
def prefix_of(address: str) -> str:
    """Return the network of an address at its usual prefix length. All invalid addresses are one network."""
    found = parsed(address)
    return "unknown" if found is None else usual_network(found)


def is_in(address: str, networks: Networks) -> bool:
    """Return whether the address is in one of the networks; False for an invalid address."""
    found = parsed(address)
    return found is not None and any(found in network for network in networks)


def without_port(address: str) -> str:
    """Remove the caller's port, which some proxies add: 192.0.2.1:4711, [2001:db8::1]:4711."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.partition(":")[0] if address.count(":") == 1 else address


def caller_bounds_of(config: CoordinatorConfig) -> CallerBounds:
    """Return the limits that the settings describe."""
    callers = Callers(proxies=config.behind, trusted=config.trusted)
    names = {name.lower().rstrip(".") for name in config.hosts}

    def is_host(address: str, host: str) -> bool:
        return callers.is_proxy(address) or is_own_host(address, host, names)

    return CallerBounds(
        network_of=lambda address, forwarded: callers.network_of(callers.address(address, forwarded)),
        is_proxy=callers.is_proxy,
        is_host=is_host,
        lag_s_max=config.lag_ms_max / 1_000 or math.inf,
        connects_per_second=config.connects_per_second,
        requests_per_second=config.public_requests_per_second,
        member_requests_per_second=MEMBER_REQUESTS_TIMES * config.requests_per_second,
    )
