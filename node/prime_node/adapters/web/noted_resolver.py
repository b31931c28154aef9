"""A resolver like aiohttp's that records every IP address of a server, and bounds where its other names lead.

It detects a run's name that leads to the internet first and into a private network later (DNS rebinding). A run may name further
addresses. They must lead to the same machine for this one and for the server: a run on the internet directs no machine into the
network around it.
"""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

from prime_protocol.addresses import may_be_named, parse_ip

HOSTS_MAX = 64
"""Addresses recorded for one client; with one more, the name counts as leading everywhere."""


class NotedResolver(ThreadedResolver):
    """Resolver of one HTTP client. `server` is the name or IP address that its user gave."""

    def __init__(self, server: str) -> None:
        super().__init__()
        self._server, address = server, parse_ip(server)
        self._proxy = ""
        self.hosts = frozenset[str]() if address is None else frozenset([str(address)])
        """IP address of the server, or the addresses that its name has resolved to so far."""

    def let_pass(self, proxy: str | None) -> None:
        """Resolve the name of a proxy for the next requests: where it leads is the choice of this machine's owner."""
        self._proxy = urlsplit(proxy or "").hostname or ""

    def may_ask(self, host: str) -> bool:
        """Return whether a request may go to this name or IP address. Where a name leads is checked when it is resolved."""
        return host == self._server or parse_ip(host) is None or may_be_named(host, between=self.hosts)

    async def require_near(self, host: str) -> None:
        """Raise OSError if a further name leads into another network, before a proxy resolves it.

        A name that this machine cannot resolve is none of the network around it.
        """
        self._proxy = ""
        for name in () if host == self._server else (host,) if self.hosts else (self._server, host):
            with contextlib.suppress(socket.gaierror):
                await self.resolve(name)

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve a name and record its addresses."""
        found = await super().resolve(host, port, family)
        if host == self._proxy:
            return found
        if host != self._server:
            known = [one for one in found if may_be_named(one["host"], between=self.hosts)]
            if not known:
                raise OSError(f"{host} leads into another network than {self._server}")
            return known
        hosts = self.hosts | {one["host"] for one in found}
        self.hosts = hosts if len(hosts) <= HOSTS_MAX else frozenset([*sorted(hosts)[:HOSTS_MAX], ""])
        return found
