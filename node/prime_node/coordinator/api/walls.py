"""What the coordinator's HTTP server holds against strangers, and the names under which it may be asked for.

A web page can lead a browser to an address of its owner's choice under the page's own name (DNS rebinding): to a coordinator on
the same machine or network, whose status it could then read. The name stands in the header Host. So a caller at an address that
is not public must name an address, this machine, a name that nobody can register, or one that the operator has listed. From a
public address everybody can read the status anyway, and a proxy of the operator's own decides for itself.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from prime_node.coordinator.api.callers import Callers, parsed
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.ports.web import CallerBounds

MEMBER_REQUESTS_TIMES = 4
"""A member's requests, the unsigned ones included, by its rate of signed ones."""
PRIVATE_DOMAINS = ("localhost", "local", "internal")
"""Names under these, and names without a dot, belong to nobody in the public DNS (RFC 6761, RFC 6762, ICANN's reservation)."""
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}(?:%25[0-9a-z._-]{1,32})?\]|[0-9a-z._-]{1,253})(?::[0-9]{1,5})?")


def caller_bounds_of(config: CoordinatorConfig) -> CallerBounds:
    """The walls that the settings describe."""
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
    """May a browser's request have come here under this value of Host without the help of a stranger's DNS?"""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return not host  # HTTP/1.0 has none; no browser speaks it
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
