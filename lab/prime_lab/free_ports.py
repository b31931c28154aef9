"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import socket


def free_ports(count: int) -> list[int]:
    """Return different ports of 127.0.0.1 on which nothing listens now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()
