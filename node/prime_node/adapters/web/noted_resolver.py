"""Looks names up as aiohttp does, and remembers every IP address that came of it.

A run's name that leads to the internet now and into a private network later (DNS rebinding) is recognised by that.
"""

from __future__ import annotations

import socket

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

HOSTS_MAX = 64
"""Addresses that are remembered of one client; one more, and the name counts as leading everywhere."""


class NotedResolver(ThreadedResolver):
    """Of one HTTP client."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: frozenset[str] = frozenset()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        hosts = self.hosts | {one["host"] for one in found}
        self.hosts = hosts if len(hosts) <= HOSTS_MAX else frozenset([*sorted(hosts)[:HOSTS_MAX], ""])
        return found
