"""Limits of the coordinator's HTTP server for strangers, and the host names that it accepts.

DNS rebinding: a web page can lead a browser to an address of the page owner's choice under the page's own name. That may be a
coordinator on the same machine or network, whose status the page could then read. The header Host contains the name. So a
caller at a non-public address must name an address, this machine, a name that cannot be registered, or one that the operator
has listed. From a public address anyone can read the status anyway, and the operator's own proxies decide for themselves.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from prime_node.coordinator.api.callers import Callers, parsed
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.web import CallerBounds

MEMBER_REQUESTS_TIMES = 4
"""Limit on a member's requests, the unsigned ones included, as a multiple of its rate of signed ones."""
PRIVATE_DOMAINS = ("localhost", "local", "internal")
"""Domains without an owner in the public DNS, like names without a dot (RFC 6761, RFC 6762, ICANN's reservation)."""
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}(?:%25[0-9a-z._-]{1,32})?\]|[0-9a-z._-]{1,253})(?::[0-9]{1,5})?")


def caller_bounds_of(config: CoordinatorConfig) -> CallerBounds:
    """Return the limits that the settings describe."""
    callers = Callers(proxies=config.behind, trusted=config.trusted)
    names = {name.lower().rstrip(".") for name in config.hosts}

    def is_host(address: str, host: str) -> bool:
        return callers.is_proxy(address) or _is_public(address) or is_safe_host(host, names)

    return CallerBounds(
        network_of=lambda address, forwarded: callers.network_of(callers.address(address, forwarded)),
        is_proxy=callers.is_proxy,
        is_host=is_host,
        connects_per_second=config.connects_per_second,
        requests_per_second=config.public_requests_per_second,
        member_requests_per_second=MEMBER_REQUESTS_TIMES * config.requests_per_second,
    )


def is_safe_host(host: str, names: Collection[str]) -> bool:
    """Return whether a browser's request can have this value of Host without a stranger's DNS."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return not host  # HTTP/1.0 has none; no browser uses it
    name = found[1].strip("[]").rstrip(".")
    if name in names or "." not in name or name.rpartition(".")[2] in PRIVATE_DOMAINS:
        return True
    return _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _is_public(address: str) -> bool:
    found = parsed(address)
    return found is not None and found.is_global
