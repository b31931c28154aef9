"""What the swarm costs a contributor: processor, memory and uplink, idle and while it serves; and what is left for a call.

    python scripts/bench/contributor.py [--quick] [--json] [--rounds 3]

The first part is a worker among four (shaped/race.py; needs root): its processor time for each GB that it exchanges, then its
memory, processor time and traffic while nothing is published. Memory is split: file pages, most of them a compiler's, are
shared with other processes and given back when memory is short. The floor is a process that only imports what a worker needs.

In the second part a home with 10 Mbit/s up, whose router holds packets for a second, uploads a policy to six others, 30 ms
away, while a call of 1.9 Mbit/s leaves over the same line (shaped/call.py): by turns with `swarm.yields` and without; then the
same without the call. The home has CUBIC, which most systems have; `--congestion bbr` asks for another.

The line is delay.py's, since a queue in the home's own kernel is none: Linux bounds what a connection has in its own queues, and
without a round-trip time sends 64 KB at once, which alone is 50 ms of such a line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from checks import Check, Output, at_most
from processes import processor_s
from shaped.call import EVERY_S
from shaped.network import Link, Network
from shaped.race import PRODUCT, Row, run
from shaped.rows import links
from shaped.systems import ours

CALL = Path(__file__).parent / "shaped" / "call.py"
CALL_PORT = 9_900
QUIET_S = 2.0
"""Seconds of the call before the upload begins. Its median delay is what the line takes anyway."""
HOME = Link(10, 100, delay_ms=10, queue_ms=1_000, congestion="cubic")
OTHER = Link(100, 100, delay_ms=5)
NUM_RECEIVERS = 6
START_S = 3.0
"""Seconds of an upload in which the line's rate is found out."""
FLOOR = """
from prime_node.cli import wire_swarm
from prime_node.adapters.web import aiohttp_server, http_client, http_peer
from prime_node.broadcast.follow import follower
from prime_node.broadcast.swarm import mesh, peer
from prime_protocol.codec.compiling import ready_decoder
ready_decoder()
print(open("/proc/self/status").read())
"""
MEDIAN_BAR, PEAK_BAR, SLOWER_BAR, LOST_BAR = 0.25, 0.4, 1.1, 0.01
"""With yielding over without: delay that an upload adds to a call, as the median and as 95 % of the packets, and time of the
upload on an unused line. And the share of the call's packets that are lost."""
IDLE_SHARE_BAR, ANONYMOUS_BAR_MB = 0.02, 200.0
"""Share of a core of an idle worker; its memory beyond its weights, without pages of files."""


@dataclass
class Idle:
    """A worker that holds the newest policy."""

    seconds: float
    found: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def beside(self, network: Network) -> Iterator[None]:
        """Measure host 1 once all hosts are done."""
        yield
        host = network.hosts[1]
        pid = host.processes[0].pid
        sent, received = network.bytes_sent_and_received(host)
        before_s = processor_s(pid)
        time.sleep(self.seconds)
        used_s = processor_s(pid) - before_s
        sent_after, received_after = network.bytes_sent_and_received(host)
        self.found = {
            "share of a core": round(used_s / self.seconds, 4),
            "sent MB an hour": round((sent_after - sent) / 1e6 * 3600 / self.seconds, 1),
            "received MB an hour": round((received_after - received) / 1e6 * 3600 / self.seconds, 1),
            **resident_mb(Path(f"/proc/{pid}/status").read_text()),
        }


def resident_mb(status: str) -> dict[str, float]:
    """Return the resident memory of a process from its status file: its own, and pages of files."""
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    kinds = {"memory MB": "RssAnon", "file pages MB": "RssFile"}
    return {kind: round(int(fields[name].split()[0]) / 1024, 1) for kind, name in kinds.items()}


@dataclass
class Call:
    """A call from the home to host 1."""

    delays_ms: dict[int, float] = field(default_factory=dict)
    num_quiet: int = 0
    """Packets before the upload begins."""

    @contextlib.contextmanager
    def beside(self, network: Network) -> Iterator[None]:
        home, other = network.hosts[:2]
        folder = Path(other.processes[0].folder).parent / "call"
        folder.mkdir()
        python, where = [sys.executable, str(CALL)], [other.address, str(CALL_PORT)]
        hears = network.start(other, [*python, "hear", *where, str(folder / "delays.json")], folder)
        time.sleep(0.5)
        sends = network.start(home, [*python, "send", *where], folder)
        time.sleep(QUIET_S)
        self.num_quiet = int(QUIET_S / 2 / EVERY_S)
        yield
        sends.stop()
        hears.stop()
        read = json.loads((folder / "delays.json").read_text())
        self.delays_ms = {int(number): delay_ms for number, delay_ms in read.items()}

    def summary(self) -> dict[str, float]:
        """Return what the upload added to the delay of the call's packets, and the share of them that it lost."""
        numbers = sorted(self.delays_ms)
        usual_ms = statistics.median(self.delays_ms[number] for number in numbers if number < self.num_quiet)
        during = [self.delays_ms[number] - usual_ms for number in numbers if number >= 2 * self.num_quiet]
        steady = [
            self.delays_ms[number] - usual_ms for number in numbers if number >= 2 * self.num_quiet + START_S / EVERY_S
        ]
        lost = 1 - len(numbers) / (numbers[-1] + 1)
        return {
            "added ms, median": round(statistics.median(during), 1),
            "added ms, most": round(max(during), 1),
            "added ms, 95 %, after the start": round(statistics.quantiles(steady, n=20)[18], 1),
            "lost": round(lost, 4),
        }


def idle_cost(folder: Path, size_mb: float, seconds: float) -> list[dict[str, Any]]:
    status = subprocess.run(
        [sys.executable, "-c", FLOOR], env=PRODUCT, capture_output=True, text=True, check=True
    ).stdout
    floor = {"what": "imports alone", **resident_mb(status)}
    idle = Idle(seconds)
    row = Row(f"4 equal, {size_mb:g} MB", size_mb, links(200, [50] * 4, 50))
    outcome = run(ours(), row, folder, beside=idle.beside)
    assert not outcome.failed, outcome.failed
    sent_mb = size_mb * (outcome.received_copies * 4 - outcome.origin_copies) / 4
    exchanged_gb = (size_mb * outcome.received_copies + sent_mb) / 1e3
    serving = {
        "what": f"worker, while {size_mb:g} MB come and {sent_mb:.0f} MB leave",
        "CPU s for each GB": round(outcome.cpu_receiver_s / exchanged_gb, 1),
        "peak MB": round(outcome.rss_receiver_mb),
    }
    return [floor, serving, {"what": f"worker, idle, with weights of {size_mb:g} MB", **idle.found}]


def upload(folder: Path, size_mb: float, home: Link, *, yields: bool, with_call: bool) -> dict[str, Any]:
    """Upload from the home, which is the origin here: its seeder is the same code as a worker's, and has the settings of one."""
    options = {"seeder": {"yields": yields, "upload_slots": 16}, "coordinator": {"serve_chunks": False}}
    row = Row(f"home, {size_mb:g} MB", size_mb, (home, *[OTHER] * NUM_RECEIVERS), timeout_s=120.0)
    call = Call()
    system = replace(ours(), options=options)
    outcome = run(system, row, folder, beside=call.beside) if with_call else run(system, row, folder)
    assert not outcome.failed, outcome.failed
    found: dict[str, Any] = {"what": f"upload of {size_mb:g} MB{', with a call' * with_call}", "yields": yields}
    found |= {"seconds": round(outcome.last_s, 2), "over the bound": round(outcome.ratio, 3)}
    return found | (call.summary() if with_call else {})


def uploads(folder: Path, size_mb: float, home: Link, rounds: int) -> list[dict[str, Any]]:
    """Each way `rounds` times, by turns; the middle of them by the time."""
    table: dict[tuple[bool, bool], list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for with_call in (True, False):
            for yields in (False, True):
                found = upload(folder, size_mb, home, yields=yields, with_call=with_call)
                print(found, file=sys.stderr, flush=True)
                table.setdefault((with_call, yields), []).append(found)
    return [sorted(found, key=lambda one: one["seconds"])[len(found) // 2] for found in table.values()]


def checks_of(costs: list[dict[str, Any]], table: list[dict[str, Any]], size_mb: float) -> list[Check]:
    _, _, idle = costs
    full, yielding, alone, alone_yielding = table
    slower = alone_yielding["seconds"] / alone["seconds"] if alone["seconds"] else math.inf
    return [
        at_most("idle worker: share of a core", idle["share of a core"], IDLE_SHARE_BAR),
        at_most("idle worker: MB beyond weights, without file pages", idle["memory MB"] - size_mb, ANONYMOUS_BAR_MB),
        *(
            at_most(
                f"call during an upload: added ms, {which}, with yielding over that without",
                round(yielding[f"added ms, {which}"] / max(1.0, full[f"added ms, {which}"]), 3),
                bar,
            )
            for which, bar in (("median", MEDIAN_BAR), ("95 %, after the start", PEAK_BAR))
        ),
        at_most("call during an upload: share of its packets lost", yielding["lost"], LOST_BAR),
        at_most("upload over an unused line: time with yielding over that without", round(slower, 3), SLOWER_BAR),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 MB once, and ten idle seconds: three minutes")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--uplink-mbit", type=float, default=HOME.up_mbit, help="the home's uplink")
    parser.add_argument("--congestion", default=HOME.congestion, help="the home's congestion control")
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp/prime-node-bench"), help="for files; not in /tmp")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    options.folder.mkdir(parents=True, exist_ok=True)
    size_mb, seconds = (16.0, 10.0) if options.quick else (48.0, 60.0)
    costs = idle_cost(options.folder, size_mb, seconds)
    home = replace(HOME, up_mbit=options.uplink_mbit, congestion=options.congestion)
    table = uploads(options.folder, size_mb, home, 1 if options.quick else options.rounds)
    for line in [*costs, *table]:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    return output.finish(checks_of(costs, table, size_mb))


if __name__ == "__main__":
    raise SystemExit(main())
