"""A thousand real workers behind two gateways, each the product's whole loop with the smallest model: how the work is shared.

    python scripts/bench/crowd_workers.py [--json]            100 and 1,000 workers, five steps
    python scripts/bench/crowd_workers.py --quick [--json]    20 and 100 workers, three steps

Each worker (prime_node.worker) has its own key, folder, follower of the policies, spool and receipts. Its engine is a table of
logits, so it needs almost no time to generate. Four processes hold the workers. The coordinator (SQLite, folders), two gateways
and a validator, which recomputes each bundle, are processes too. This one trains: it takes each batch and publishes a policy.
Each step has one lease of eight rollouts for each worker, so a fair share is the same number of rollouts for all. The first
policy is published once all have joined: before, those that were there would do all work, as none is kept for workers to come.

Fairness is Jain's index of the rollouts accepted from each worker: 1 if all are equal, and 0.5 if half of them do everything.
The cost of a rollout is the writer's processor time. "Refused" counts what receipts refuse.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import aiohttp
from checks import Check, Output, at_least, at_most
from gateways import FREE, NUM_GATEWAYS, TICK_SECONDS, serve_hearing, serve_linked
from processes import SPAWN, processor_s, started, use_fast_loop
from tests.node.aged_process import Digits
from tests.node.coordinator_world import Letters, World, folder_parts, memory_parts
from tests.node.gateway_world import LISTENS, gateway_parts
from tests.node.served_world import publish, validate
from tests.node.table_engine import TableEngine, equipped
from tests.node.worker_world import COORDINATOR, MODEL_FILES, TRAINER, MemorySource, make_run

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.pinned import fetch_run
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.coordinator.assembly import Parts
from prime_node.worker.config import WorkerConfig
from prime_node.worker.loop import run_worker
from prime_node.worker.worker import Worker
from prime_protocol.envelope import Envelope
from prime_protocol.identity import SigningKey
from prime_protocol.requests import BatchRequest
from prime_protocol.run_spec import PinnedRun

ROLLOUTS, GROUP = 8, 4
"""Rollouts of a lease and of a group."""
PROCESSES = 4
FAIRNESS_MIN, WASTE_MAX, TIMES_MAX = 0.8, 0.02, 1.5


def crowd_run(workers: int, steps: int) -> PinnedRun:
    return make_run(
        groups_per_step=workers * ROLLOUTS // GROUP, lease_seconds=120.0, heartbeat_seconds=30.0, max_steps=steps
    )


def serve_writer(folder: str, workers: int, steps: int, pipe: Connection) -> None:
    async def make_parts() -> Parts:
        run = crowd_run(workers, steps)
        parts = await folder_parts(run, Path(folder), **LISTENS, **FREE, tick_seconds=TICK_SECONDS)
        parts = dataclasses.replace(parts, key=COORDINATOR, environments={"toy": Letters()}, tokenizer=Digits())
        for data in MODEL_FILES.values():
            await parts.public.put(data)
        return parts

    serve_hearing(make_parts, pipe)


def serve_one_gateway(writer_port: int, workers: int, steps: int, pipe: Connection) -> None:
    serve_linked(lambda: gateway_parts(crowd_run(workers, steps), [writer_port], **FREE), pipe)


@dataclass(frozen=True)
class Outcome:
    """What one worker's receipts say at its end."""

    accepted: int
    pending: int
    refused: dict[str, int]
    ending: str


def work(urls: Sequence[str], digest: str, numbers: Sequence[int], folder: str, pipe: Connection) -> None:
    """Let workers work until the run ends; send their outcomes."""
    use_fast_loop()
    clock = SystemClock()

    async def one(number: int) -> Outcome:
        rng, place = random.Random(number), Path(folder) / str(number)
        key = SigningKey(number.to_bytes(4, "big") * 8)
        await asyncio.sleep(rng.uniform(0.0, len(numbers) / 50))
        async with HttpClient(urls[number % len(urls)], run=digest, clock=clock, key=key) as client:
            run = await fetch_run(digest, client, clock=clock)
            pool = SourcePool([("http", client)], clock=clock, rng=rng)
            worker = Worker(
                run=run,
                config=WorkerConfig.model_validate({"rollouts_max": ROLLOUTS, "receipts_seconds": 10.0}),
                key=key,
                coordinator=client,
                engine_info=TableEngine().info,
                equip=equipped(TableEngine()),
                follower=Follower(run, pool, place / "c", clock=clock, rng=rng),
                trust=Trust(run, [("http", client)], place / "trust", clock=clock, rng=rng),
                folder=place,
                clock=clock,
                rng=rng,
            )
            ending = await run_worker(worker, asyncio.Event())
            tally = worker.receipts.tally()
            return Outcome(tally.accepted, tally.pending, tally.refused, ending.value)

    async def main() -> list[Outcome]:
        return list(await asyncio.gather(*map(one, numbers)))

    pipe.send("started")
    pipe.send(asyncio.run(main()))


def check_bundles(url: str, digest: str, pipe: Connection) -> None:
    """Be the run's validator until killed."""
    use_fast_loop()

    async def main() -> None:
        async with HttpClient(url, run=digest, clock=SystemClock(), key=COORDINATOR) as client:
            await asyncio.gather(*(validate(client) for _ in range(4)))

    pipe.send("started")
    asyncio.run(main())


async def train(run: PinnedRun, url: str, workers: int, steps: int) -> list[float]:
    """Wait for all workers, then take each batch and publish the policy after it. Return the seconds of each step."""
    source, took_s = MemorySource(run), list[float]()
    async with aiohttp.ClientSession() as session:
        world = World(run, memory_parts(run), url, session)
        while f"\nprime_workers {workers:.1f}\n" not in (await world.get("/metrics"))[1].decode():  # noqa: ASYNC110
            await asyncio.sleep(0.5)
        await publish(world, source, 0, None)
        for step in range(steps):
            began_s, ask = time.perf_counter(), BatchRequest(step=step, durable_step=step, wait_s=10.0)
            while not isinstance(answer := await world.client(TRAINER).batch(ask), Envelope):
                pass
            await publish(world, source, step + 1, answer.digest)
            took_s.append(time.perf_counter() - began_s)
        for client in world.clients.values():
            await client.close()
    return took_s


def measure(workers: int, steps: int) -> tuple[list[Outcome], float]:
    """Return the workers' outcomes, and the writer's processor time of each accepted rollout in microseconds."""
    run = crowd_run(workers, steps)
    with tempfile.TemporaryDirectory(prefix="crowd-") as folder, contextlib.ExitStack() as stack:
        (port, link_port), writer = stack.enter_context(started(serve_writer, f"{folder}/writer", workers, steps))
        urls = [
            stack.enter_context(started(serve_one_gateway, link_port, workers, steps))[0] for _ in range(NUM_GATEWAYS)
        ]
        stack.enter_context(started(check_bundles, urls[0], run.digest))
        pipes = []
        for place in range(PROCESSES):
            here, there = multiprocessing.Pipe()
            arguments = (urls, run.digest, range(1 + place, 1 + workers, PROCESSES), f"{folder}/workers", there)
            process = SPAWN.Process(target=work, args=arguments, daemon=True)
            process.start()
            stack.callback(process.kill)
            pipes.append(here)
        before_s = processor_s(writer)
        took_s = asyncio.run(train(run, f"http://127.0.0.1:{port}", workers, steps))
        outcomes = []
        for here in pipes:
            assert here.poll(300.0), "the workers do not start"
            assert here.recv() == "started"
            assert here.poll(300.0), "the workers do not end"
            outcomes += here.recv()
        spent_s = processor_s(writer) - before_s
    accepted = sum(outcome.accepted for outcome in outcomes)
    print(
        f"{workers:,} workers: steps of {', '.join(f'{each:.1f}' for each in took_s)} s; {accepted:,} rollouts accepted, "
        f"{sum(outcome.pending for outcome in outcomes)} pending, refused "
        f"{dict(sum((Counter(outcome.refused) for outcome in outcomes), Counter()))}; "
        f"endings {dict(Counter(outcome.ending for outcome in outcomes))}; "
        f"{min(outcome.accepted for outcome in outcomes)} to {max(outcome.accepted for outcome in outcomes)} a worker",
        flush=True,
    )
    return outcomes, 1e6 * spent_s / max(1, accepted)


def fairness(accepted: Sequence[int]) -> float:
    """Return Jain's index: the square of the sum over the number times the sum of squares."""
    squares = len(accepted) * sum(each**2 for each in accepted)
    return sum(accepted) ** 2 / squares if squares else 0.0


def checks_of(workers: int, steps: int, outcomes: Sequence[Outcome], times: float) -> list[Check]:
    accepted = [outcome.accepted for outcome in outcomes]
    refused = sum(sum(outcome.refused.values()) for outcome in outcomes)
    name = f"{workers:,} workers"
    return [
        at_least(f"{name}: rollouts accepted of those trained on", sum(accepted) / (workers * ROLLOUTS * steps), 1),
        at_most(f"{name}: share of rollouts refused", refused / max(1, refused + sum(accepted)), WASTE_MAX),
        at_most(f"{name}: did not end in order", sum(outcome.ending != "drained" for outcome in outcomes), 0),
        at_most(f"{name}: writer's processor time of a rollout over that with a tenth of them", times, TIMES_MAX),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute")
    parser.add_argument("--json", action="store_true", help="print the checks alone, as JSON")
    options = parser.parse_args()
    output = Output(as_json=options.json)
    few, many, steps = (20, 100, 3) if options.quick else (100, 1_000, 5)
    _, few_us = measure(few, steps)
    outcomes, many_us = measure(many, steps)
    print(f"writer's processor time of a rollout: {few_us:.0f} us with {few} workers, {many_us:.0f} us with {many:,}")
    checks, fair = checks_of(many, steps, outcomes, many_us / few_us), fairness([each.accepted for each in outcomes])
    print(f"fairness (Jain's index): {fair:.2f}")
    if not options.quick:  # in three steps it is decided by which workers started first
        checks.append(at_least(f"{many:,} workers: fairness (Jain's index)", fair, FAIRNESS_MIN))
    return output.finish(checks)


if __name__ == "__main__":
    raise SystemExit(main())
