"""A small internet on one machine: Linux network namespaces on a bridge. Some are homes behind a router that masquerades.

It needs root, iproute2 and nftables, and for round-trip times /dev/net/tun: shaped/delay.py then carries packets. It touches
nothing outside the namespaces, and removes everything when the context ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PUBLIC, HOME, SYMMETRIC, CARRIER = "public", "home", "symmetric", "carrier"
"""An open address; behind a masquerading router that keeps ports; behind one that gives each connection a random port; behind a
home's router that is itself behind its provider's."""
UNSHAPED_MBIT = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a process can run. Example: Place("nat1a2bh1", "192.168.1.2", "10.99.0.3", "home")."""

    namespace: str
    inner: str
    """Its own address."""
    outer: str
    """Its address for others: its own, or its router's."""
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
def internet(kinds: Sequence[str], *, round_trip_ms: float = 0.0) -> Iterator[list[Place]]:
    """One place of each kind, all reachable from each other as far as their routers allow. At most 250."""
    tag = f"pn{uuid.uuid4().hex[:6]}"
    made: list[str] = []
    carrier: subprocess.Popen[bytes] | None = None
    try:
        edges = [_namespace(f"{tag}e{number}", made) for number in range(len(kinds))]
        outer = [f"10.99.0.{number + 2}" for number in range(len(kinds))]
        if round_trip_ms:
            carrier = _carry(edges, outer, round_trip_ms)
        else:
            _bridge(_namespace(f"{tag}b", made), edges)
        yield [_place(tag, number, kind, edges[number], outer[number], made) for number, kind in enumerate(kinds)]
    finally:
        if carrier is not None:
            carrier.kill()
            carrier.wait()
        for namespace in reversed(made):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _bridge(bridge: str, edges: Sequence[str]) -> None:
    """A device `wan` in every one of them, all on one wire."""
    _ip(bridge, "link add br0 type bridge")
    _ip(bridge, "link set br0 up")
    for number, edge in enumerate(edges):
        _ip(edge, f"link add wan type veth peer name port{number} netns {bridge}")
        _ip(bridge, f"link set port{number} master br0 up")


def _carry(edges: Sequence[str], outer: Sequence[str], round_trip_ms: float) -> subprocess.Popen[bytes]:
    """The same, and every packet takes half the round trip."""
    rows = [[edge, address, UNSHAPED_MBIT, UNSHAPED_MBIT] for edge, address in zip(edges, outer, strict=True)]
    script = Path(__file__).parent / "shaped" / "delay.py"
    carrier = subprocess.Popen(
        [sys.executable, str(script), json.dumps(rows), str(round_trip_ms / 4)], stdout=subprocess.PIPE
    )
    assert carrier.stdout is not None
    if carrier.stdout.readline().strip() != b"ready":
        raise RuntimeError("shaped/delay.py did not start")
    for edge in edges:
        _ip(edge, "link set eth0 name wan")
    return carrier


def _place(tag: str, number: int, kind: str, edge: str, outer: str, made: list[str]) -> Place:
    _ip(edge, f"addr add {outer}/24 dev wan")
    _ip(edge, "link set wan up")
    _ip(edge, "route add default dev wan")
    if kind == PUBLIC:
        return Place(edge, outer, outer, kind)
    _masquerade(edge, is_symmetric=kind == SYMMETRIC)
    if kind == CARRIER:
        router = _namespace(f"{tag}r{number}", made)
        _behind(edge, router, f"100.64.{number}", "wan")
        _masquerade(router, is_symmetric=False)
        edge = router
    host = _namespace(f"{tag}h{number}", made)
    _behind(edge, host, f"192.168.{number + 1}", "eth0")
    return Place(host, f"192.168.{number + 1}.2", outer, kind)


def _behind(router: str, namespace: str, network: str, device: str) -> None:
    """A wire from the router's `lan`, which is .1, to the other's `device`, which is .2."""
    _ip(router, f"link add lan type veth peer name {device} netns {namespace}")
    _ip(router, f"addr add {network}.1/24 dev lan")
    _ip(router, "link set lan up")
    _ip(namespace, f"addr add {network}.2/24 dev {device}")
    _ip(namespace, f"link set {device} up")
    _ip(namespace, f"route add default via {network}.1")


def _masquerade(router: str, *, is_symmetric: bool) -> None:
    """Drop what arrives from `wan` unrequested."""
    _run("ip", "netns", "exec", router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    ports = "masquerade random,fully-random" if is_symmetric else "masquerade"
    rules = (
        "add table ip home;"
        "add chain ip home out { type nat hook postrouting priority 100; };"
        f"add rule ip home out oifname wan {ports};"
        "add chain ip home through { type filter hook forward priority 0; policy accept; };"
        "add rule ip home through iifname wan ct state new drop;"
        "add chain ip home own { type filter hook input priority 0; policy accept; };"
        "add rule ip home own iifname wan ct state new drop"
    )
    _run("ip", "netns", "exec", router, "nft", rules)


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
