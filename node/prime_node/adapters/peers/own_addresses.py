"""The addresses that this machine's network adapters have, by ifaddr."""

from __future__ import annotations

import ifaddr


def own_addresses() -> list[str]:
    """IPv4, those of this machine alone (127.x) left out. Example: ["192.168.1.7"]."""
    found = [str(ip.ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips if ip.is_IPv4]
    return [host for host in found if not host.startswith("127.")]
