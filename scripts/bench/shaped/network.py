"""Hosts as Linux network namespaces on a bridge, every link shaped in both directions. Needs root and iproute2; NAT needs nft.

    with Network(links) as network:
        network.start(network.hosts[1], ["ping", "-c1", network.hosts[0].address])

A host's uplink is the egress of its own interface, its downlink the egress of its port of the bridge, both `tc tbf` of at least
4 ms burst and a queue of 50 ms. A host behind NAT has a router namespace in front, which masquerades and drops what it did
not ask for (an endpoint-independent mapping: what DCUtR can punch). Kernels without netem cannot delay packets; where a row
wants round-trip times, hosts hang on TUN devices and delay.py carries their packets in user space, delayed and shaped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

BYTES_PER_MBIT = 1e6 / 8
QUEUE_MS = 50
BURST_MS = 4


@dataclass(frozen=True, slots=True)
class Link:
    """One host's way to the internet. Example: Link(up_mbit=20, down_mbit=100, is_nat=True)."""

    up_mbit: float
    down_mbit: float
    is_nat: bool = False


@dataclass(slots=True)
class Host:
    """A host. Others reach it at `address` (its router's behind NAT); `own_address` is its address for itself."""

    index: int
    link: Link
    namespace: str
    address: str
    own_address: str
    router: str | None
    processes: list[Process] = field(default_factory=list)


class Process:
    """A command in a host, in a session and with a /tmp of its own. Peak memory is known at its end."""

    def __init__(self, host: Host, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        own_tmp = ["sh", "-c", 'mount --bind "$0" /tmp && exec "$@"', str(folder / "tmp")]
        with (folder / "log").open("ab") as log:
            self._child = subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, *own_tmp, *command],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self.pid = self._child.pid
        self.exit_code: int | None = None
        self.rss_mb = 0.0

    def poll(self) -> int | None:
        if self.exit_code is None:
            self._reap(os.WNOHANG)
        return self.exit_code

    def cpu_so_far_s(self) -> float:
        """Processor time until now; 0 once it has ended and was reaped."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def stop(self, *, grace_s: float = 3.0) -> None:
        """Ask, wait, and then insist."""
        if self.poll() is None:
            self._signal(signal.SIGTERM)
            end_s = time.monotonic() + grace_s
            while self.poll() is None and time.monotonic() < end_s:
                time.sleep(0.01)
        self._signal(signal.SIGKILL)
        if self.exit_code is None:
            self._reap(0)

    def _reap(self, options: int) -> None:
        pid, status, usage = os.wait4(self.pid, options)
        if pid:
            self.exit_code = self._child.returncode = os.waitstatus_to_exitcode(status)
            self.rss_mb = usage.ru_maxrss / 1024

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


class Network:
    """Host 0 is the origin. Everything is removed at the end, and what was left running is killed."""

    def __init__(self, links: Sequence[Link], *, delay_ms: float = 0.0) -> None:
        """`delay_ms` is what each host adds one way, so that a round trip between two hosts takes four times that."""
        self._tag = f"pn{os.getpid() % 100_000}"
        self._bridge = f"{self._tag}b"
        self._delay_ms = delay_ms
        self._carrier: subprocess.Popen[bytes] | None = None
        self.hosts = [self._host(index, link) for index, link in enumerate(links)]

    def _host(self, index: int, link: Link) -> Host:
        address = f"10.77.{(index + 1) // 250}.{(index + 1) % 250 + 1}"
        own_address = f"192.168.{index % 250}.2" if link.is_nat else address
        router = f"{self._tag}r{index}" if link.is_nat else None
        return Host(index, link, f"{self._tag}h{index}", address, own_address, router)

    def __enter__(self) -> Self:
        try:
            self._delayed() if self._delay_ms else self._bridged()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            for process in host.processes:
                process.stop(grace_s=0.0)
        if self._carrier is not None:
            self._carrier.kill()
            self._carrier.wait()
        for host in self.hosts:
            for namespace in (host.namespace, host.router):
                if namespace:
                    _run(f"ip netns del {namespace}", check=False)
        _run(f"ip netns del {self._bridge}", check=False)

    def start(
        self, host: Host, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> Process:
        process = Process(host, command, folder, environment or {})
        host.processes.append(process)
        return process

    def bytes_sent_and_received(self, host: Host) -> tuple[int, int]:
        """Over its link, headers included."""
        shown = _run(f"ip -n {host.router or host.namespace} -s -j link show eth0")
        counters = json.loads(shown)[0]["stats64"]
        return counters["tx"]["bytes"], counters["rx"]["bytes"]

    def bytes_received_by_all(self) -> int | None:
        """Return the bytes that all hosts but the origin received, in one reading; None without a bridge."""
        if self._delay_ms:
            return None
        ports = {f"port{host.index}" for host in self.hosts[1:]}
        shown = json.loads(_run(f"ip -n {self._bridge} -s -j link show"))
        return sum(int(link["stats64"]["tx"]["bytes"]) for link in shown if link["ifname"] in ports)

    def cut_off(self, hosts: Sequence[Host]) -> None:
        """Let these hosts reach only each other, until `heal`."""
        for host in hosts:
            _run(f"ip -n {self._bridge} link set port{host.index} master br1")

    def heal(self) -> None:
        for host in self.hosts:
            _run(f"ip -n {self._bridge} link set port{host.index} master br0")

    # Construction

    def _bridged(self) -> None:
        _run(f"ip netns add {self._bridge}")
        for bridge in ("br0", "br1"):
            _run(f"ip -n {self._bridge} link add {bridge} type bridge")
            _run(f"ip -n {self._bridge} link set {bridge} up")
        for host in self.hosts:
            self._plug_in(host)

    def _plug_in(self, host: Host) -> None:
        _run(f"ip netns add {host.namespace}")
        _run(f"ip -n {host.namespace} link set lo up")
        if host.router:
            _run(f"ip netns add {host.router}")
        outer, port = host.router or host.namespace, f"port{host.index}"
        _run(f"ip -n {outer} link add eth0 type veth peer name {port} netns {self._bridge}")
        _run(f"ip -n {self._bridge} link set {port} master br0 up")
        _run(f"ip -n {outer} addr add {host.address}/16 dev eth0")
        _run(f"ip -n {outer} link set eth0 up")
        _shape(outer, "eth0", host.link.up_mbit)
        _shape(self._bridge, port, host.link.down_mbit)
        if host.router:
            self._put_behind_nat(host, host.router)

    def _put_behind_nat(self, host: Host, router: str) -> None:
        gateway = host.own_address[:-1] + "1"
        _run(f"ip -n {router} link add lan0 type veth peer name eth0 netns {host.namespace}")
        _run(f"ip -n {router} addr add {gateway}/24 dev lan0")
        _run(f"ip -n {router} link set lan0 up")
        _run(f"ip -n {host.namespace} addr add {host.own_address}/24 dev eth0")
        _run(f"ip -n {host.namespace} link set eth0 up")
        _run(f"ip -n {host.namespace} route add default via {gateway}")
        _run(f"ip netns exec {router} sysctl -qw net.ipv4.ip_forward=1")
        rules = (
            "add table ip n; "
            "add chain ip n out { type nat hook postrouting priority 100; }; "
            "add rule ip n out oifname eth0 masquerade; "
            "add chain ip n through { type filter hook forward priority 0; policy accept; }; "
            "add rule ip n through iifname eth0 ct state new drop; "
            "add chain ip n in { type filter hook input priority 0; policy accept; }; "
            "add rule ip n in iifname eth0 ct state new drop"
        )
        _run(["ip", "netns", "exec", router, "nft", rules])

    def _delayed(self) -> None:
        assert not any(host.router for host in self.hosts), "NAT and delay do not go together here"
        rows = []
        for host in self.hosts:
            _run(f"ip netns add {host.namespace}")
            _run(f"ip -n {host.namespace} link set lo up")
            rows.append([host.namespace, host.address, host.link.up_mbit, host.link.down_mbit])
        self._carrier = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("delay.py")), json.dumps(rows), str(self._delay_ms)],
            stdout=subprocess.PIPE,
        )
        assert self._carrier.stdout is not None
        if self._carrier.stdout.readline().strip() != b"ready":
            raise RuntimeError("delay.py did not start")
        for host in self.hosts:
            _run(f"ip -n {host.namespace} addr add {host.address}/16 dev eth0")
            _run(f"ip -n {host.namespace} link set eth0 up")


def _shape(namespace: str, device: str, mbit: float) -> None:
    burst_kb = max(32, int(mbit * BYTES_PER_MBIT * BURST_MS / 1e3 / 1024))
    limits = f"rate {mbit}mbit burst {burst_kb}kb latency {QUEUE_MS}ms"
    _run(f"ip netns exec {namespace} tc qdisc add dev {device} root tbf {limits}")


def _run(command: str | list[str], *, check: bool = True) -> str:
    words = shlex.split(command) if isinstance(command, str) else command
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")
    return done.stdout
