"""A coordinator with thousands of workers: failover, cost of its log on SQLite and PostgreSQL, restart, pauses of its event loop.

    python scripts/bench/thousands.py [--quick] [--json]

Log: batches of 100 events of a real run's kind, processor time of this process alone, SQLite and PostgreSQL in turn, medians of
the rounds. PostgreSQL is a real server that this benchmark starts. Restart: the state from a log without a snapshot, processor
time again, and the check of the state with many open groups in a step, at two sizes. Pauses: a coordinator with 10,000 workers
serves while one worker joins and leaves, and makes one snapshot after another; a probe on its event loop measures how late timers
are. Lateness counts as far as this process computed meanwhile: other load of the machine is not counted. Gateways: gateways.py.
Failover: a leader and a
standby on real PostgreSQL and S3 serve two workers, a validator and a trainer. The leader is killed again and again, and once
stopped for three terms; then each acknowledged bundle, verdict and batch is asked for again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import aiohttp
from checks import Check, Output, at_most
from gateways import measure_gateways
from tests.node.coordinator_process import crash_run
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    HEARTBEAT,
    TRAINER,
    VALIDATOR,
    World,
    make_run,
    memory_parts,
    running,
)
from tests.node.crowd_world import Crowd, check_promises, persist
from tests.node.standby_world import Pair, answers_of_stopped

from prime_lab.memory_store import MemoryStore
from prime_lab.postgres_server import PASSWORD, PostgresServer, open_postgres, postgres_server
from prime_lab.s3_server import BUCKET, S3Server, s3_server
from prime_node.adapters.storage.postgres_leader import TERM_SECONDS
from prime_node.adapters.storage.sqlite_store import open_sqlite
from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import SchedulerRules, rules_of
from prime_node.coordinator.state.tick import tick
from prime_node.coordinator.state_follower import restore_state
from prime_node.ports.store import LoggedEvent, Store, StoredReceipt
from prime_protocol.errors import RemoteError
from prime_protocol.requests import LeaveRequest

BATCH = 100
NUM_WORKERS = 10_000
APPEND_US_MAX = {"SQLite": 25.0, "PostgreSQL": 8.0}
"""The embedded store inserts each row by a call of its own. SQLAlchemy took 50 and 35 (2026-11-22)."""
RESTART_US_MAX, PAUSE_MS_MAX, FAILOVER_S_MAX = 10.0, 20.0, 5.0


def joined(number: int) -> LoggedEvent:
    """Return the event of one of NUM_WORKERS workers that joins, again and again."""
    worker = f"12D3KooW{number % NUM_WORKERS:044d}"
    event = ev.WorkerJoined(worker=worker, name=f"node {number}", software="1", engine="toy fp32 cpu", rollouts_max=64)
    return LoggedEvent(number, 1_763_690_000_000 + number, ev.event_to_json(event))


def receipts_of(events: Sequence[LoggedEvent]) -> list[StoredReceipt]:
    """Return a receipt for every tenth event, of the size that receipts have."""
    return [
        StoredReceipt(f"{one.number:064d}", f"lease {one.number}", "anna", 3, "accepted", "x" * 1_400)
        for one in events[::10]
    ]


async def append_us(store: Store, num_batches: int) -> float:
    """Return the processor time of an event in microseconds, the median of the batches."""
    taken = []
    number = 1
    for _ in range(num_batches):
        events = [joined(place) for place in range(number, number + BATCH)]
        receipts = receipts_of(events)
        lines = [receipt.envelope for receipt in receipts]
        begun = time.process_time()
        await store.append(events, receipts, lines)
        taken.append(time.process_time() - begun)
        number += BATCH
    return 1e6 * statistics.median(taken) / BATCH


async def restart_us(store: Store, rules: SchedulerRules) -> float:
    """Return the processor time of an event in microseconds that a restart takes to read and fold it."""
    begun = time.process_time()
    number, _ = await restore_state(store, rules)
    return 1e6 * (time.process_time() - begun) / number


async def measure_log(server: PostgresServer, folder: Path, *, num_events: int) -> list[Check]:
    run = make_run()
    stores = {
        "SQLite": await open_sqlite(folder / "state.sqlite", run=run.digest),
        "PostgreSQL": await open_postgres(server.make_database(), run=run.digest),
    }
    checks = []
    for name, store in stores.items():
        us = await append_us(store, num_events // BATCH)
        checks.append(
            at_most(f"{name}: append of an event at batches of {BATCH}, us of processor", us, APPEND_US_MAX[name])
        )
    for name, store in stores.items():
        us = min([await restart_us(store, rules_of(run)) for _ in range(3)])
        checks.append(at_most(f"{name}: restart, us of processor per event", us, RESTART_US_MAX))
        await store.close()
    return checks


def check_s(num_groups: int) -> float:
    """Return the seconds that the check at a start takes with so many open groups in a step."""
    state = State(rules_of(make_run(groups_per_step=num_groups)))
    route = UpdateRoute(base_version=None, sent_bytes=1)
    tick(state, ev.ManifestPublished(policy_version=0, digest="ab" * 32, routes=(route,)), 1)
    assert sum(len(step.open) for step in state.steps.values()) >= num_groups
    taken = []
    for _ in range(3):
        begun = time.process_time()
        invariants.check_invariants(state)
        taken.append(time.process_time() - begun)
    return min(taken)


def measure_check(*, large: int) -> list[Check]:
    small_s, large_s = check_s(large // 4), check_s(large)
    print(f"check at a start: {large // 4} groups {small_s:.3f} s, {large} groups {large_s:.3f} s")
    return [
        at_most(
            "check at a start: time of four times as many groups over four times the time", large_s / (4 * small_s), 2.0
        )
    ]


@asynccontextmanager
async def full_coordinator(*, snapshot_events: int) -> AsyncIterator[World]:
    """Serve a run with NUM_WORKERS active workers."""
    store = MemoryStore()
    await store.append([joined(number) for number in range(1, NUM_WORKERS)])  # ANNA is the last one
    run = make_run(heartbeat_seconds=300.0)
    parts = memory_parts(
        run,
        snapshot_events=snapshot_events,
        tick_seconds=0.1,
        workers_per_network_max=NUM_WORKERS + 9,
        requests_per_second=1e9,
        faults_per_second=1e9,
    )
    async with running(replace(parts, store=store)) as world:
        yield world


async def lateness_ms(seconds: float) -> list[float]:
    """Return how late timers of one millisecond are, over a time, as far as this process computed meanwhile."""
    late, loop = [], asyncio.get_running_loop()
    end_s = loop.time() + seconds
    while (begun := loop.time()) < end_s:
        computed = time.process_time()
        await asyncio.sleep(0.001)
        late.append(1_000 * min(loop.time() - begun - 0.001, time.process_time() - computed))
    return late


async def join_and_leave(world: World) -> None:
    while True:
        await world.join(ANNA)
        await world.client(ANNA).leave(LeaveRequest())


async def measure_pauses(*, seconds: float) -> list[Check]:
    gc.collect()
    gc.freeze()
    alone = await lateness_ms(seconds)
    async with full_coordinator(snapshot_events=10**9) as world:
        await asyncio.sleep(1.0)
        ticks = await lateness_ms(seconds)
    async with full_coordinator(snapshot_events=1) as world:
        working = asyncio.create_task(join_and_leave(world))
        await asyncio.sleep(1.0)
        both = await lateness_ms(seconds)
        assert not working.done(), working.result()
        working.cancel()
    for name, late in (("no coordinator", alone), ("ticks", ticks), ("ticks and snapshots", both)):
        centiles = statistics.quantiles(late, n=100)
        print(
            f"{name}: p50 {centiles[49]:.2f} ms, p99 {centiles[98]:.2f} ms, max {max(late):.2f} ms of {len(late)} timers"
        )
    return [
        at_most(f"longest pause by ticks at {NUM_WORKERS} workers, ms", max(ticks), PAUSE_MS_MAX),
        at_most(f"longest pause by ticks and snapshots at {NUM_WORKERS} workers, ms", max(both), PAUSE_MS_MAX),
    ]


async def measure_failover(server: PostgresServer, s3: S3Server, folder: Path, *, num_kills: int) -> list[Check]:
    settings = {"store": server.make_database(), "blobs": f"s3://{BUCKET}/failover", "standby": "true"}
    pair = Pair(folder, settings, {"PGPASSWORD": PASSWORD, **s3.environment})
    await pair.start(0)
    await pair.start(1)
    run = make_run(**crash_run())
    taken_s = []
    async with aiohttp.ClientSession() as session:
        world = World(run, memory_parts(run), pair.urls[0], session)
        for key in (ANNA, BEN, VALIDATOR, TRAINER):
            world.client(key).also_at(pair.urls)
        crowd, broken = Crowd(world, 1), 0
        try:
            async with crowd.working():
                for _ in range(num_kills):
                    await crowd.progress(3)
                    killed = await pair.leader(session)
                    begun_s = time.monotonic()
                    pair.daemons[killed].send(signal.SIGKILL)
                    await persist(lambda: world.client(ANNA).heartbeat(HEARTBEAT))
                    taken_s.append(time.monotonic() - begun_s)
                    await pair.daemons[killed].wait()
                    await pair.start(killed, pair.ports[killed])
                    await asyncio.sleep(1.0)  # it reads the log
                answers = await answers_of_stopped(pair, world, crowd.progress(1), stop_s=3 * TERM_SECONDS)
                await crowd.progress(1)
                await crowd.stop()
                try:
                    await check_promises(crowd)
                except (AssertionError, RemoteError) as error:
                    print(f"broken promise: {error}")
                    broken = 1
        finally:
            await pair.kill()
    print(
        f"{num_kills} kills: {len(crowd.uploaded)} bundles, {len(crowd.accepted)} verdicts and {len(crowd.batches)} batches "
        f"acknowledged; without an answer for {', '.join(f'{one:.1f}' for one in taken_s)} s"
    )
    return [
        at_most("failover: acknowledged and lost, or taken twice", broken, 0),
        at_most("failover: longest time without an answer, s", max(taken_s), FAILOVER_S_MAX),
        at_most("failover: answers of a leader that was stopped for three terms", sum(map(bool, answers)), 0),
    ]


async def measure(*, quick: bool) -> list[Check]:
    os.environ["PGPASSWORD"] = PASSWORD
    with postgres_server() as server, tempfile.TemporaryDirectory(prefix="thousands-") as folder:
        with s3_server() as s3:
            checks = await measure_failover(server, s3, Path(folder), num_kills=3 if quick else 20)
        checks += await asyncio.to_thread(measure_gateways, Path(folder), quick=quick)
        checks += await measure_log(server, Path(folder), num_events=20_000 if quick else 1_000_000)
    checks += measure_check(large=16_384 if quick else 65_536)
    return checks + await measure_pauses(seconds=5.0 if quick else 60.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="3 kills, 20,000 events and 5 s of pauses, not 20, a million and 60"
    )
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    arguments = parser.parse_args()
    output = Output(as_json=arguments.json)
    return output.finish(asyncio.run(measure(quick=arguments.quick)))


if __name__ == "__main__":
    sys.exit(main())
