"""Hosts as Linux network namespaces on a bridge, every link shaped in both directions. Needs root and iproute2; NAT needs nft.

    with Network(links) as network:
        network.start(network.hosts[1], ["ping", "-c1", network.hosts[0].address])

A host's uplink is the egress of its own interface, its downlink the egress of its port of the bridge, both `tc tbf` of at least
4 ms burst and a queue of 50 ms. A host behind NAT has a router namespace in front (routers.py). Kernels without netem cannot
delay packets; where a link has a delay or losses, the links are TUN devices, and delay.py carries their packets in user space,
shaped, delayed and dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from prime_lab.homes import NatKind

from .routers import add_namespace, masquerade, put_behind, run_command

BYTES_PER_MBIT = 1e6 / 8
QUEUE_MS = 50
BURST_MS = 4


@dataclass(frozen=True, slots=True)
class Link:
    """One host's way to the internet. Example: Link(up_mbit=20, down_mbit=100, nat=NatKind.HOME)."""

    up_mbit: float
    down_mbit: float
    nat: NatKind = NatKind.PUBLIC
    delay_ms: float = 0.0
    """One way, to the core of the internet: a round trip between two hosts takes twice the sum of both."""
    loss: float = 0.0
    """Share of the packets that are lost, in each direction."""
    queue_ms: float = 0.0
    """Time for which packets may wait on its uplink: routers of homes hold them for seconds. 0 is QUEUE_MS, or delay.py's."""
    congestion: str = ""
    """Congestion control of its connections, such as `cubic`; empty is this kernel's."""

    @property
    def is_nat(self) -> bool:
        return self.nat is not NatKind.PUBLIC


@dataclass(slots=True)
class Host:
    """A host. Others reach it at `address` (its router's behind NAT); `own_address` is its address for itself."""

    index: int
    link: Link
    namespace: str
    edge: str
    """Namespace with the link: the host's own, or its router's."""
    address: str
    own_address: str
    processes: list[Process] = field(default_factory=list)


class Process:
    """A command in a host, in a session and with a /tmp of its own. Peak memory is known at its end."""

    def __init__(self, host: Host, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        self.folder = folder
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

    def peak_mb(self) -> float:
        """Largest resident memory until now; at its end, that of its whole life."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return self.rss_mb
        return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line[:6] == "VmHWM:"), self.rss_mb)

    def tcp_segments_sent_and_resent(self) -> tuple[int, int]:
        """Counts of its host so far; zeros once it has ended."""
        try:
            names, values = [
                line.split()
                for line in Path(f"/proc/{self.pid}/net/snmp").read_text().splitlines()
                if line[:4] == "Tcp:"
            ]
        except OSError:
            return 0, 0
        counts = dict(zip(names, values, strict=True))
        return int(counts["OutSegs"]), int(counts["RetransSegs"])

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

    def __init__(self, links: Sequence[Link]) -> None:
        self._tag = f"pn{os.getpid() % 100_000}"
        self._bridge = f"{self._tag}b"
        self._made: list[str] = []
        self._is_carried = any(link.delay_ms or link.loss for link in links)
        self._carrier: subprocess.Popen[bytes] | None = None
        self.hosts = [self._host(index, link) for index, link in enumerate(links)]

    def _host(self, index: int, link: Link) -> Host:
        address = f"10.77.{(index + 1) // 250}.{(index + 1) % 250 + 1}"
        namespace = f"{self._tag}h{index}"
        if not link.is_nat:
            return Host(index, link, namespace, namespace, address, address)
        return Host(index, link, namespace, f"{self._tag}e{index}", address, f"192.168.{index % 250}.2")

    def __enter__(self) -> Self:
        try:
            self._carried() if self._is_carried else self._bridged()
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
        for namespace in reversed(self._made):
            run_command(f"ip netns del {namespace}", check=False)

    def start(
        self, host: Host, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> Process:
        process = Process(host, command, folder, environment or {})
        host.processes.append(process)
        return process

    def bytes_sent_and_received(self, host: Host) -> tuple[int, int]:
        """Over its link, headers included."""
        shown = run_command(f"ip -n {host.edge} -s -j link show eth0")
        counters = json.loads(shown)[0]["stats64"]
        return counters["tx"]["bytes"], counters["rx"]["bytes"]

    def bytes_received_by_all(self) -> int | None:
        """Return the bytes that all hosts but the origin received, in one reading; None without a bridge."""
        if self._is_carried:
            return None
        ports = {f"port{host.index}" for host in self.hosts[1:]}
        shown = json.loads(run_command(f"ip -n {self._bridge} -s -j link show"))
        return sum(int(link["stats64"]["tx"]["bytes"]) for link in shown if link["ifname"] in ports)

    def cut_off(self, hosts: Sequence[Host]) -> None:
        """Let these hosts reach only each other, until `heal`."""
        for host in hosts:
            run_command(f"ip -n {self._bridge} link set port{host.index} master br1")

    def heal(self) -> None:
        for host in self.hosts:
            run_command(f"ip -n {self._bridge} link set port{host.index} master br0")

    # Construction

    def _bridged(self) -> None:
        self._namespace(self._bridge)
        for bridge in ("br0", "br1"):
            run_command(f"ip -n {self._bridge} link add {bridge} type bridge")
            run_command(f"ip -n {self._bridge} link set {bridge} up")
        for host in self.hosts:
            port = f"port{host.index}"
            self._namespace(host.edge)
            run_command(f"ip -n {host.edge} link add eth0 type veth peer name {port} netns {self._bridge}")
            run_command(f"ip -n {self._bridge} link set {port} master br0 up")
            self._plug_in(host)
            _shape(host.edge, "eth0", host.link.up_mbit, host.link.queue_ms or QUEUE_MS)
            _shape(self._bridge, port, host.link.down_mbit)

    def _carried(self) -> None:
        rows: list[list[str | float]] = []
        for host in self.hosts:
            self._namespace(host.edge)
            link = host.link
            rows.append(
                [host.edge, host.address, link.up_mbit, link.down_mbit, link.delay_ms, link.loss, link.queue_ms]
            )
        self._carrier = start_carrier(rows)
        for host in self.hosts:
            self._plug_in(host)

    def _plug_in(self, host: Host) -> None:
        """Give a host's link its address, and put the host behind its routers."""
        run_command(f"ip -n {host.edge} addr add {host.address}/16 dev eth0")
        run_command(f"ip -n {host.edge} link set eth0 up")
        if host.link.congestion:
            route = f"10.77.0.0/16 dev eth0 proto kernel scope link src {host.address}"
            run_command(f"ip -n {host.edge} route change {route} congctl {host.link.congestion}")
        if not host.link.is_nat:
            return
        outer = host.edge
        masquerade(outer, wan="eth0", is_symmetric=host.link.nat is NatKind.SYMMETRIC)
        if host.link.nat is NatKind.CARRIER:
            self._namespace(router := f"{self._tag}r{host.index}")
            put_behind(outer, router, f"100.64.{host.index % 250}", device="wan")
            masquerade(router, wan="wan")
            outer = router
        self._namespace(host.namespace)
        put_behind(outer, host.namespace, host.own_address.rpartition(".")[0], device="eth0")

    def _namespace(self, name: str) -> None:
        add_namespace(name)
        self._made.append(name)


def start_carrier(rows: Sequence[Sequence[str | float]]) -> subprocess.Popen[bytes]:
    """Make the TUN devices that `rows` describe to delay.py, and carry their packets until the process is killed."""
    script = Path(__file__).with_name("delay.py")
    carrier = subprocess.Popen([sys.executable, str(script), json.dumps(rows)], stdout=subprocess.PIPE)
    assert carrier.stdout is not None
    if carrier.stdout.readline().strip() != b"ready":
        raise RuntimeError("delay.py did not start")
    return carrier


def _shape(namespace: str, device: str, mbit: float, queue_ms: float = QUEUE_MS) -> None:
    burst_kb = max(32, int(mbit * BYTES_PER_MBIT * BURST_MS / 1e3 / 1024))
    limits = f"rate {mbit}mbit burst {burst_kb}kb latency {queue_ms}ms"
    run_command(f"ip netns exec {namespace} tc qdisc add dev {device} root tbf {limits}")
