"""Addresses of this machine's network adapters, by ifaddr."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Interface, IPv4Network

import ifaddr


def own_addresses() -> list[str]:
    """Return the IPv4 addresses except loopback (127.x). Example: ["192.168.1.7"]."""
    return [str(one.ip) for one in _interfaces()]


def is_next_to_us(host: str) -> bool:
    """Return whether an IPv4 address is in a network that this machine has an adapter in, other than loopback."""
    return any(IPv4Address(host) in one.network for one in _interfaces() if one.network != IPv4Network("0.0.0.0/0"))


def _interfaces() -> list[IPv4Interface]:
    found = [IPv4Interface(f"{ip.ip}/{ip.network_prefix}") for a in ifaddr.get_adapters() for ip in a.ips if ip.is_IPv4]
    return [one for one in found if not one.ip.is_loopback]
