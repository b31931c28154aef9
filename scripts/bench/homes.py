"""A small internet on one machine: Linux network namespaces on a bridge, some of them homes behind a router that masquerades.

Needs root, iproute2 and nftables. Nothing outside the namespaces is touched; everything is gone when the context ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PUBLIC, HOME, SYMMETRIC = "public", "home", "symmetric"
"""An open address; behind a masquerading router that keeps ports; behind one that gives each connection a random port."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process can run. Example: Place("nat1a2bh1", "192.168.1.2", "10.99.0.3", "home")."""

    namespace: str
    inner: str
    """Its own address."""
    outer: str
    """The address that others see: its own, or its router's."""
    kind: str

    def command(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *argv]


def missing() -> str:
    """Why this machine cannot do it; empty where it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tools = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    return f"needs {' and '.join(tools)}" if tools else ""


@contextlib.contextmanager
def internet(kinds: Sequence[str]) -> Iterator[list[Place]]:
    """One place of each kind, all reachable from each other as far as their routers allow. At most 250."""
    tag = f"pn{uuid.uuid4().hex[:6]}"
    made: list[str] = []
    try:
        yield [*_build(tag, kinds, made)]
    finally:
        for namespace in reversed(made):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _build(tag: str, kinds: Sequence[str], made: list[str]) -> Iterator[Place]:
    bridge = _namespace(f"{tag}b", made)
    _ip(bridge, "link add br0 type bridge")
    _ip(bridge, "link set br0 up")
    for number, kind in enumerate(kinds):
        host = _namespace(f"{tag}h{number}", made)
        edge = host if kind == PUBLIC else _namespace(f"{tag}r{number}", made)
        outer = f"10.99.0.{number + 2}"
        _ip(edge, f"link add wan type veth peer name port{number} netns {bridge}")
        _ip(bridge, f"link set port{number} master br0 up")
        _ip(edge, f"addr add {outer}/24 dev wan")
        _ip(edge, "link set wan up")
        _ip(edge, "route add default dev wan")
        if kind == PUBLIC:
            yield Place(host, outer, outer, kind)
            continue
        inner = f"192.168.{number + 1}.2"
        _ip(edge, f"link add lan type veth peer name eth0 netns {host}")
        _ip(edge, f"addr add 192.168.{number + 1}.1/24 dev lan")
        _ip(edge, "link set lan up")
        _ip(host, f"addr add {inner}/24 dev eth0")
        _ip(host, "link set eth0 up")
        _ip(host, f"route add default via 192.168.{number + 1}.1")
        _run("ip", "netns", "exec", edge, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        ports = "masquerade random,fully-random" if kind == SYMMETRIC else "masquerade"
        rules = (
            "add table ip home;"
            "add chain ip home out { type nat hook postrouting priority 100; };"
            f"add rule ip home out oifname wan {ports};"
            "add chain ip home through { type filter hook forward priority 0; policy accept; };"
            "add rule ip home through iifname wan ct state new drop;"
            "add chain ip home own { type filter hook input priority 0; policy accept; };"
            "add rule ip home own iifname wan ct state new drop"
        )
        _run("ip", "netns", "exec", edge, "nft", rules)
        yield Place(host, inner, outer, kind)


def _namespace(name: str, made: list[str]) -> str:
    _run("ip", "netns", "add", name)
    made.append(name)
    _ip(name, "link set lo up")
    return name


def _ip(namespace: str, words: str) -> None:
    _run("ip", "-n", namespace, *words.split())


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")
