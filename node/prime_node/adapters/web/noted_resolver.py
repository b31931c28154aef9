"""A resolver like aiohttp's that records every IP address it found.

It detects a run's name that leads to the internet first and into a private network later (DNS rebinding).
"""

from __future__ import annotations

import socket

from aiohttp.abc import ResolveResult
from aiohttp.resolver import ThreadedResolver

HOSTS_MAX = 64
"""Addresses recorded for one client; with one more, the name counts as leading everywhere."""


class NotedResolver(ThreadedResolver):
    """Resolver of one HTTP client."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: frozenset[str] = frozenset()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Resolve a name and record its addresses."""
        found = await super().resolve(host, port, family)
        hosts = self.hosts | {one["host"] for one in found}
        self.hosts = hosts if len(hosts) <= HOSTS_MAX else frozenset([*sorted(hosts)[:HOSTS_MAX], ""])
        return found
