"""Events per second of the scheduler on one core, and the cost of an event by number of workers.

    python scripts/bench/scheduler.py [--quick] [--json]

One process, no I/O: the state machine with the decisions in front of it, as the coordinator's handlers call them. Every worker
leases a group, uploads it and has it judged; the trainer takes its batches and publishes. A step has as many groups as there are
workers, at least 1,024, so with 100,000 workers all of them hold a lease at once. An event is a call of `tick`; making it and the
decision before it (which slots, which batch) are part of its cost. Baseline, in the same run: the same with 100 workers.

It also measures the parts of that time (microseconds per lease), and the bytes of a worker: after it has joined, after its first
lease, and for each further lease that is remembered.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import tracemalloc
from collections import defaultdict
from typing import Any

from checks import Output, at_least

from prime_lab.scenario import make_rules
from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import choose_batch, forgettable_step, next_step, stale_slots
from prime_node.coordinator.state.endings import leases_remembered
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.scheduler import Grant, choose_slots
from prime_node.coordinator.state.tick import tick
from prime_protocol.schedule import Schedule

G = 8
REWARDS = (1.0,) * G


def begin(preset: str, num_workers: int) -> tuple[State, list[str]]:
    """Return a run with policy 0, and its workers."""
    rules = make_rules(
        Schedule.model_validate({"preset": preset}),
        async_level=2,
        groups_per_step=-(-max(1_024, num_workers) // 4) * 4,
        max_steps=10**6,
        workers=10**6,
        rollouts_per_group=G,
    )
    state, names = State(rules), [f"w{number}" for number in range(num_workers)]
    for name in names:
        tick(state, ev.WorkerJoined(name, name, "1", "engine", 64), 0)
    tick(state, ev.ManifestPublished(0, "d", (UpdateRoute(None, 1),)), 0)
    return state, names


def measure(preset: str, num_workers: int, num_events: int, laps: defaultdict[str, float]) -> float:
    """Events a second. To `laps` is added what each kind of event took, in seconds, and under "leases" how many there were."""
    state, names = begin(preset, num_workers)
    steps = max(1, round(num_events / (3 * state.rules.groups_per_step)))
    rng = random.Random(num_workers)
    orders = [rng.sample(range(num_workers), num_workers) for _ in range(3)]
    gc.collect()
    gc.disable()
    began, count = time.perf_counter(), 0
    try:
        for version in range(steps):
            now_ms = 1_000 * version
            count += _fill(state, names, orders, version, now_ms, laps)
            before = time.perf_counter()
            count += _train(state, version, now_ms)
            laps["batches and policy"] += time.perf_counter() - before
    finally:
        gc.enable()
    return count / (time.perf_counter() - began)


def _fill(
    state: State, names: list[str], orders: list[list[int]], version: int, now_ms: int, laps: defaultdict[str, float]
) -> int:
    """Workers go round until the step's batches can be taken."""
    count = 0
    wanted = (version + 1) * state.rules.groups_per_step
    while state.num_accepted_groups < wanted:
        leased, began = [], time.perf_counter()
        for place in orders[count % 3]:
            worker = state.workers[names[place]]
            found = choose_slots(state, worker, policy_version=version, rollouts_max=G, now_ms=now_ms)
            if not isinstance(found, Grant):
                break
            lease = f"{version}-{found.slots[0]}-{state.num_leases}"
            kept = leases_remembered(state)
            granting = ev.LeaseGranted(
                lease, worker.worker, found.step, version, "d", found.slots, 10**9, remembered=kept
            )
            tick(state, granting, now_ms)
            leased.append((lease, worker.worker))
        granted = time.perf_counter()
        for lease, name in leased[::-1]:
            tick(state, ev.BundleArrived("b" + lease, lease, name, G, 1), now_ms + 500)
        arrived = time.perf_counter()
        for lease, _ in leased:
            tick(state, ev.VerdictGiven("b" + lease, None, "", REWARDS, 64, "v"), now_ms + 600)
        laps["lease"] += granted - began
        laps["bundle"] += arrived - granted
        laps["verdict"] += time.perf_counter() - arrived
        laps["leases"] += len(leased)
        count += 3 * len(leased)
    return count


def _train(state: State, version: int, now_ms: int) -> int:
    count = 0
    while not state.is_given(version):
        step = next_step(state)
        assert not stale_slots(state, step)
        chosen = choose_batch(state)
        assert chosen is not None
        tick(state, ev.BatchFixed(step, chosen), now_ms + 700)
        count += 1
    tick(state, ev.ManifestPublished(version + 1, "d", (UpdateRoute(None, 1),)), now_ms + 900)
    tick(state, ev.TrainerDurable(forgettable_step(state, version)), now_ms + 900)
    return count + 2


def bytes_each(num_workers: int, num_leases: int) -> dict[str, float]:
    """Return the memory that a worker takes."""
    tracemalloc.start()
    state, names = begin("prime_rl", num_workers)
    gc.collect()
    bytes_per = {"worker that has joined": tracemalloc.get_traced_memory()[0] / num_workers}
    orders, sizes = [list(range(num_workers))] * 3, []
    for version in range(num_leases):
        now_ms = 1_000 * version
        _fill(state, names, orders, version, now_ms, defaultdict(float))
        _train(state, version, now_ms)
        tick(state, ev.TrainerDurable(forgettable_step(state, version + 1)), now_ms)
        sizes.append(tracemalloc.get_traced_memory()[0] / num_workers)
    tracemalloc.stop()
    bytes_per["worker that has had a lease"] = sizes[0]
    bytes_per["further lease, remembered"] = (sizes[-1] - sizes[0]) / (num_leases - 1)
    return bytes_per


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="below a minute")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    sizes = (100, 1_000, 10_000, 100_000)
    rounds, num_events = (3, 60_000) if options.quick else (5, 300_000)
    rows: list[dict[str, Any]] = []
    for preset in ("prime_rl", "verl_partial"):
        rates: dict[int, list[float]] = {size: [] for size in sizes}
        laps: dict[int, defaultdict[str, float]] = {size: defaultdict(float) for size in sizes}
        for _ in range(rounds):  # the sizes in turn, so that a busy moment hits them alike
            for size in sizes:
                rates[size].append(measure(preset, size, num_events, laps[size]))
        rows += [
            {
                "preset": preset,
                "workers": size,
                "median": statistics.median(found),
                "low": min(found),
                "high": max(found),
                "lease_us": {
                    name: 1e6 * took / laps[size]["leases"] for name, took in laps[size].items() if name != "leases"
                },
            }
            for size, found in rates.items()
        ]
    num_counted = 20_000 if options.quick else sizes[-1]
    memory = bytes_each(num_counted, 2 if options.quick else 8)
    checks = []
    for preset in ("prime_rl", "verl_partial"):
        of = {row["workers"]: row["median"] for row in rows if row["preset"] == preset}
        checks.append(at_least(f"{preset}: events a second, 100,000 workers", of[100_000], 100_000))
        checks.append(at_least(f"{preset}: rate with 100,000 workers of that with 100", of[100_000] / of[100], 0.5))
    for row in rows:
        what = f"{row['preset']}, {row['workers']:,} workers"
        print(f"{what:32} {row['median']:10,.0f} events/s   ({row['low']:,.0f} to {row['high']:,.0f})")
        print("    us: " + ", ".join(f"{name} {took:.1f}" for name, took in row["lease_us"].items()))
    for name, taken in memory.items():
        print(f"{name}, of {num_counted:,}: {taken:,.0f} bytes")
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
