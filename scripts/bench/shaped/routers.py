"""Namespaces and the routers in front of them. Needs root, iproute2 and, for a router, nft."""

from __future__ import annotations

import shlex
import subprocess


def add_namespace(name: str) -> None:
    run_command(f"ip netns add {name}")
    run_command(f"ip -n {name} link set lo up")


def put_behind(router: str, namespace: str, network: str, *, device: str) -> None:
    """Lay a wire from the router's `lan`, which is .1 of the network, to the other's `device`, which is .2."""
    run_command(f"ip -n {router} link add lan type veth peer name {device} netns {namespace}")
    run_command(f"ip -n {router} addr add {network}.1/24 dev lan")
    run_command(f"ip -n {router} link set lan up")
    run_command(f"ip -n {namespace} addr add {network}.2/24 dev {device}")
    run_command(f"ip -n {namespace} link set {device} up")
    run_command(f"ip -n {namespace} route add default via {network}.1")


def masquerade(router: str, *, wan: str, is_symmetric: bool = False) -> None:
    """Forward from `lan` to `wan`, and drop what arrives from `wan` unrequested.

    Ports are kept, an endpoint-independent mapping that hole punching can use. A symmetric router gives each connection a
    random port.
    """
    run_command(f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1")
    ports = "masquerade random,fully-random" if is_symmetric else "masquerade"
    rules = (
        "add table ip home;"
        "add chain ip home out { type nat hook postrouting priority 100; };"
        f"add rule ip home out oifname {wan} {ports};"
        "add chain ip home through { type filter hook forward priority 0; policy accept; };"
        f"add rule ip home through iifname {wan} ct state new drop;"
        "add chain ip home own { type filter hook input priority 0; policy accept; };"
        f"add rule ip home own iifname {wan} ct state new drop"
    )
    run_command(["ip", "netns", "exec", router, "nft", rules])


def run_command(command: str | list[str], *, check: bool = True) -> str:
    words = shlex.split(command) if isinstance(command, str) else command
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout
