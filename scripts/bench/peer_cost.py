"""Cost of a peer: MB/s per core for serving and receiving, memory above the file's size, and leaks of many peers.

    python scripts/bench/peer_cost.py [--quick] [--json] [--peers 50] [--leak-minutes 0]

The first part sends one file from one process to another over an unshaped link between namespaces (shaped/race.py; needs root):
this project as a worker (which also decodes) and as a seeder (which does not), raw aiohttp (sendfile; hashed and written) and
libtorrent. Processor time counts from the start of the race until the receiver is done. The second part runs the followers and
peers of `--peers` workers in one process, each linked to a neighbourhood, while a trainer publishes one small policy after
another. It counts open files, tasks and memory once every peer has each policy.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from checks import Check, Output, at_most
from processes import resident_bytes
from shaped.race import Row, System, run
from shaped.rows import links
from shaped.systems import baselines, ours

UNSHAPED_MBIT = 20_000
SEEDER = "prime-node seeder"
FULL_MB_MAX = 256
"""Larger files are for the seeder alone: beyond what it holds of pieces, its memory should not grow with them."""
LEAK_FILES_MAX, LEAK_TASKS_MAX = 0.05, 0.05
"""Growth over the second half, as a share."""
LEAK_BYTES_MAX, LEAK_PEER_BYTES_MAX = 2**18, 2**14
"""Maximum bytes that a policy may leave: at the coordinator, with its stores in memory, and at each peer, which keeps the
chain."""
WARM_SHARE = 0.5
"""Links are made and caches fill in the first part of the steps: growth is counted after it."""


def costs(sizes: list[int], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """One receiver for each system and size; the middle of `rounds`."""
    table = []
    for size in sizes:
        row = Row(f"1 receiver, {size} MB", size, links(UNSHAPED_MBIT, [UNSHAPED_MBIT], UNSHAPED_MBIT), timeout_s=60)
        others = baselines(folder, row)
        systems: dict[str, System] = {
            "prime-node worker": ours(),
            SEEDER: replace(ours(), options={"is_seeder": True}),
            "raw aiohttp": others["naive HTTP"],
            "libtorrent": others["libtorrent"],
        }
        if size > FULL_MB_MAX:
            systems = {SEEDER: systems[SEEDER]}
        for name, system in systems.items():
            found = [run(system, row, folder) for _ in range(rounds)]
            assert not any(one.failed for one in found), [one.failed for one in found]
            serving = statistics.median(size / max(0.01, one.cpu_origin_s) for one in found)
            receiving = statistics.median(size / max(0.01, one.cpu_receiver_s) for one in found)
            table.append(
                {
                    "system": name,
                    "MB": size,
                    "serving MB/s a core": round(serving),
                    "receiving MB/s a core": round(receiving),
                    "wall MB/s": round(statistics.median(size / one.last_s for one in found)),
                    "receiver's peak MB": round(max(one.rss_receiver_mb for one in found)),
                }
            )
            print(table[-1], file=sys.stderr, flush=True)
    return table


async def leak(num_peers: int, seconds: float) -> dict[str, Any]:
    """Open files, tasks and memory while policies go by."""
    import numpy as np
    from tests.node.coordinator_world import make_run
    from tests.node.swarm_world import swarm, until

    from prime_node.coordinator.config import CoordinatorConfig
    from prime_protocol.identity import SigningKey
    from prime_protocol.weights import WeightTensor

    samples: list[tuple[int, int, int]] = []
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        # All of them have one address here: its share of requests is not what is measured.
        config = CoordinatorConfig.load(
            {"coordinator": {"port": 0, "tick_seconds": 0.05, "requests_per_second": 1e9, "faults_per_second": 1e9}}
        )
        async with swarm(Path(folder), run=make_run(max_steps=100_000), config=config) as made:
            for number in range(num_peers):
                await made.worker(SigningKey(number.to_bytes(32, "big")), neighbours_max=8)
            dice = np.random.default_rng(1)
            words = dice.integers(0, 2**16, 2**16, dtype=np.uint16)
            began_s, step = time.monotonic(), -1
            while time.monotonic() - began_s < seconds or step < 3:
                step += 1
                words = words.copy()
                words[dice.integers(0, len(words), 500)] ^= 1
                weights = {"layer": WeightTensor("bf16", (len(words),), words)}
                await made.publish(delta=step % 8 != 0, weights=weights)
                for follower, _ in made.workers:
                    await until(lambda follower=follower, step=step: follower.versions()[-1:] == (step,), seconds=60)  # type: ignore[misc]
                gc.collect()
                samples.append((len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks()), resident_bytes("self")))  # noqa: PTH208
    warm = samples[int(WARM_SHARE * len(samples)) :]
    return {
        "peers": num_peers,
        "seconds": round(time.monotonic() - began_s),
        "policies": len(samples),
        "files": [warm[0][0], warm[-1][0]],
        "tasks": [warm[0][1], warm[-1][1]],
        "resident_mb": [round(warm[0][2] / 1e6, 1), round(warm[-1][2] / 1e6, 1)],
        "bytes_a_policy": round((warm[-1][2] - warm[0][2]) / max(1, len(warm) - 1)),
    }


def checks_of(table: list[dict[str, Any]], leaked: dict[str, Any] | None) -> list[Check]:
    checks = []
    seeders = [line for line in table if line["system"] == SEEDER]
    if len(seeders) > 1:
        *_, before, last = seeders
        share = (last["receiver's peak MB"] - before["receiver's peak MB"]) / (last["MB"] - before["MB"])
        checks.append(at_most("a seeder's memory, over the file's growth", share, 0.2))
    if leaked is not None:
        for name, bar in (("files", LEAK_FILES_MAX), ("tasks", LEAK_TASKS_MAX)):
            first, last = leaked[name]
            checks.append(at_most(f"{name} in the second half, growth", (last - first) / first, bar))
        kept, bar = leaked["bytes_a_policy"], LEAK_BYTES_MAX + leaked["peers"] * LEAK_PEER_BYTES_MAX
        checks.append(at_most("bytes that stay of a policy", kept, bar))
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="64 MB once, and ten peers for ten seconds: under a minute"
    )
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    parser.add_argument("--peers", type=int, default=50, help="of the second part")
    parser.add_argument("--leak-minutes", type=float, default=0.0, help="of the second part; 0 leaves it out")
    parser.add_argument("--only-leak", action="store_true", help="leave out the first part")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--folder", type=Path, default=Path("/var/tmp/prime-node-bench"), help="for files and baselines"
    )
    options = parser.parse_args()
    output = Output(as_json=options.json)
    options.folder.mkdir(parents=True, exist_ok=True)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    table = (
        [] if options.only_leak else costs([64] if options.quick else [64, 256, 512], options.folder, options.rounds)
    )
    peers, minutes = (10, 1 / 6) if options.quick else (options.peers, options.leak_minutes)
    leaked = None
    if minutes:
        import uvloop

        with contextlib.suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            leaked = runner.run(leak(peers, 60 * minutes))
    checks = checks_of(table, leaked)
    for line in [*table, *([leaked] if leaked else [])]:
        print("  ".join(f"{name} {value}" for name, value in line.items()))
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
