"""A resolver like aiohttp's that records every IP address of a server, and bounds where its other names lead.

It detects a run's name that leads to the internet first and into a private network later (DNS rebinding). A run may name further
addresses. They must lead to the same machine for this one and for the server: a run on the internet directs no machine into the
network around it, nor a proxy into its own.

The proxy of a server is that of this machine's settings: the variables http_proxy, https_proxy and no_proxy, or the system's own.
A server on this machine is asked directly, whatever the settings say.
"""

from __future__ import annotations

import contextlib
import socket
from contextvars import ContextVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from aiohttp.abc import ResolveResult

from prime_node.adapters.name_lookups import PatientResolver
from prime_protocol.addresses import LOOPBACK, is_name, may_be_named, parse_ip, place_of


def proxy_for(url: str) -> str | None:
    """Return the proxy through which a URL is requested; None for none."""
    address = urlsplit(url)
    host = address.hostname or ""
    proxy = getproxies().get(address.scheme)
    if not proxy or host == "localhost" or place_of(host) == LOOPBACK or proxy_bypass(host):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def has_tls(url: str) -> bool:
    """Return whether a URL is asked over TLS. A client whose first URL is sends nothing to another one that is not."""
    return urlsplit(url).scheme == "https"


def shown_proxy(proxy: str) -> str:
    """Return a proxy's address without its user's name and password."""
    address = urlsplit(proxy)
    return f"{address.scheme}://{address.netloc.rpartition('@')[2]}"


def with_host(url: str, address: str) -> str:
    """Return a URL with an IP address in place of its host's name."""
    parts = urlsplit(url)
    port = "" if parts.port is None else f":{parts.port}"
    return parts._replace(netloc=(f"[{address}]" if ":" in address else address) + port).geturl()


HOSTS_MAX = 64
"""Addresses recorded for one client; with one more, the name counts as leading everywhere."""
_PROXY = ContextVar("proxy", default="")
"""Name of the proxy of this task's request."""


class NotedResolver(PatientResolver):
    """Resolver of one HTTP client. `server` is the name or IP address that its user gave."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self._server, address = server, parse_ip(server)
        self.hosts = frozenset[str]() if address is None else frozenset([str(address)])
        """IP address of the server, or the addresses that its name has resolved to so far."""

    def let_pass(self, proxy: str | None) -> None:
        """Resolve the name of a proxy for this task's next request: where it leads is the choice of this machine's owner."""
        _PROXY.set(urlsplit(proxy or "").hostname or "")

    def may_ask(self, host: str) -> bool:
        """Return whether a request may go to this name or IP address. Where a name leads is checked when it is resolved."""
        return host == self._server or is_name(host) or may_be_named(host, between=self.hosts)

    async def asked_of_proxy(self, host: str) -> str:
        """Return the host that a proxy is asked for: the server or an IP address itself, or a further name's address.

        A proxy resolves names again, by servers of its own, and a run may answer these otherwise. Raises OSError for a name that
        leads into another network, or that this machine cannot resolve.
        """
        if host == self._server or parse_ip(host) is not None:
            return host
        if not self.hosts:
            with contextlib.suppress(socket.gaierror):
                self._checked(self._server, await super().resolve(self._server, 0, socket.AF_UNSPEC))
        found = self._checked(host, await super().resolve(host, 0, socket.AF_UNSPEC))
        return min((one["host"] for one in found), key=lambda address: ":" in address)  # more proxies reach IPv4

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve a name and record its addresses."""
        found = await super().resolve(host, port, family)
        return found if host == _PROXY.get() else self._checked(host, found)

    def _checked(self, host: str, found: list[ResolveResult]) -> list[ResolveResult]:
        if host != self._server:
            known = [one for one in found if may_be_named(one["host"], between=self.hosts)]
            if not known:
                raise OSError(f"{host} leads into another network than {self._server}")
            return known
        hosts = self.hosts | {one["host"] for one in found}
        self.hosts = hosts if len(hosts) <= HOSTS_MAX else frozenset([*sorted(hosts)[:HOSTS_MAX], ""])
        return found
