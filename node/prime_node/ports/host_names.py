"""Rule for the header Host, against DNS rebinding.

A web page can lead a browser to an address of the page owner's choice under the page's own name. That may be a server on the
browser's own machine or network, from which the page could then read. The header Host contains the name. So a caller at a
non-public address must name an address, this machine, a name that cannot be registered, or one that the server's owner has
listed. From a public address anyone can read what the server serves anyway.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from functools import lru_cache

PRIVATE_DOMAINS = ("localhost", "local", "internal")
"""Domains without an owner in the public DNS, like names without a dot (RFC 6761, RFC 6762, ICANN's reservation)."""
_HOST = re.compile(r"(\[[0-9a-f:.]{2,45}(?:%25[0-9a-z._-]{1,32})?\]|[0-9a-z._-]{1,253})(?::[0-9]{1,5})?")


def is_own_host(address: str, host: str, names: Collection[str] = ()) -> bool:
    """Return whether a caller at this address may use this value of Host. `names` are further names of this server."""
    return _is_public(address) or _is_safe_host(host, names)


@lru_cache(4_096)
def parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the parsed address, IPv4 for IPv4 inside IPv6; None for an invalid one."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _is_safe_host(host: str, names: Collection[str]) -> bool:
    """Return whether a browser's request can have this value of Host without a stranger's DNS."""
    found = _HOST.fullmatch(host.lower())
    if found is None:
        return not host  # HTTP/1.0 has none; no browser uses it
    name = found[1].strip("[]").rstrip(".")
    if name in names or "." not in name or name.rpartition(".")[2] in PRIVATE_DOMAINS:
        return True
    return parsed(name) is not None


def _is_public(address: str) -> bool:
    found = parsed(address)
    return found is not None and found.is_global
