"""The proxy of this machine's settings for a server: the variables http_proxy, https_proxy and no_proxy, or the system's own.

A server on this machine is asked directly, whatever the settings say.
"""

from __future__ import annotations

from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from prime_protocol.addresses import LOOPBACK, place_of


def proxy_for(url: str) -> str | None:
    """Return the proxy through which a URL is requested; None for none."""
    address = urlsplit(url)
    host = address.hostname or ""
    proxy = getproxies().get(address.scheme)
    if not proxy or host == "localhost" or place_of(host) == LOOPBACK or proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def shown_proxy(proxy: str) -> str:
    """Return a proxy's address without its user's name and password."""
    address = urlsplit(proxy)
    return f"{address.scheme}://{address.netloc.rpartition('@')[2]}"


def with_host(url: str, address: str) -> str:
    """Return a URL with an IP address in place of its host's name."""
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return parts._replace(netloc=(f"[{address}]" if ":" in address else address) + port).geturl()
