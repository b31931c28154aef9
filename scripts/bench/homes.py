"""A small internet on one machine: Linux network namespaces on a bridge. Some are homes behind a router that masquerades.

It needs root, iproute2 and nftables, and for round-trip times /dev/net/tun: shaped/delay.py then carries packets. It touches
nothing outside the namespaces, and removes everything when the context ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shaped.network import start_carrier
from shaped.routers import add_namespace, masquerade, put_behind, run_command

from prime_lab.homes import NatKind

UNSHAPED_MBIT = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """A place where a process can run. Example: Place("nat1a2bh1", "192.168.1.2", "10.99.0.3", "home")."""

    namespace: str
    inner: str
    """Its own address."""
    outer: str
    """Its address for others: its own, or its router's."""
    kind: NatKind

    def command(self, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *argv]


def missing() -> str:
    """Why this machine cannot do it; empty where it can."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    tools = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    return f"needs {' and '.join(tools)}" if tools else ""


@contextlib.contextmanager
def internet(kinds: Sequence[NatKind], *, round_trip_ms: float = 0.0) -> Iterator[list[Place]]:
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
    delay_ms = round_trip_ms / 4
    links = zip(edges, outer, strict=True)
    carrier = start_carrier(
        [[edge, address, UNSHAPED_MBIT, UNSHAPED_MBIT, delay_ms, 0.0, 0.0] for edge, address in links]
    )
    for edge in edges:
        _ip(edge, "link set eth0 name wan")
    return carrier


def _place(tag: str, number: int, kind: NatKind, edge: str, outer: str, made: list[str]) -> Place:
    _ip(edge, f"addr add {outer}/24 dev wan")
    _ip(edge, "link set wan up")
    _ip(edge, "route add default dev wan")
    if kind is NatKind.PUBLIC:
        return Place(edge, outer, outer, kind)
    masquerade(edge, wan="wan", is_symmetric=kind is NatKind.SYMMETRIC)
    if kind is NatKind.CARRIER:
        router = _namespace(f"{tag}r{number}", made)
        put_behind(edge, router, f"100.64.{number}", device="wan")
        masquerade(router, wan="wan")
        edge = router
    host = _namespace(f"{tag}h{number}", made)
    put_behind(edge, host, f"192.168.{number + 1}", device="eth0")
    return Place(host, f"192.168.{number + 1}.2", outer, kind)


def _namespace(name: str, made: list[str]) -> str:
    add_namespace(name)
    made.append(name)
    return name


def _ip(namespace: str, words: str) -> None:
    run_command(f"ip -n {namespace} {words}")
