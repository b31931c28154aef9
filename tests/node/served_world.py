"""Shared parts of the tests of workers with a real coordinator."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

from tests.node.aged_process import Digits
from tests.node.coordinator_world import Letters, World, memory_parts
from tests.node.table_engine import VOCAB_SIZE, TableEngine, equipped, prefill, table_weights
from tests.node.worker_world import COORDINATOR, MODEL_FILES, TRAINER, WORKER, MemorySource, make_run
from tests.time_world import until

from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.pinned import fetch_run
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.coordinator.assembly import Parts
from prime_node.worker.config import WorkerConfig
from prime_node.worker.loop import run_worker
from prime_node.worker.worker import Ending, Worker
from prime_protocol.envelope import Envelope, PayloadType, parse_json
from prime_protocol.parcel import open_parcel
from prime_protocol.replies import CheckTask, TrainBatch
from prime_protocol.requests import BatchRequest, BundleRequest, CheckRequest, CheckResultRequest
from prime_protocol.rollout import RolloutHeader, parse_body
from prime_protocol.verify import check_assignment, judge, statistics, summary

RUN = make_run(lease_seconds=60.0, heartbeat_seconds=0.2, max_steps=2)


async def validate(client: HttpClient) -> None:
    """Run a validator that recomputes every logprob and every choice, without end."""
    while True:
        task = await client.check(CheckRequest(policy_versions=(), wait_s=1.0))
        if not isinstance(task, CheckTask):
            continue
        parcel = open_parcel(await client.bundle(BundleRequest(bundle=task.bundle)), body_bytes_max=2**20)
        header = parse_json(parcel.envelope.verify(PayloadType.ROLLOUT, trusted=[task.lease.worker]), RolloutHeader)
        rollouts = parse_body(header, parcel.check_body(header), RUN.spec.limits)
        verdict = check_assignment(header, rollouts, task.lease, vocab_size=VOCAB_SIZE)
        if verdict.accepted:
            truth = prefill(table_weights(header.policy_version), task.lease, rollouts)
            verdict = judge(summary(statistics(rollouts, truth)), RUN.spec.checks)
        rewards = tuple(float(index % 2) for index in range(len(rollouts))) if verdict.accepted else ()
        await client.check_result(
            CheckResultRequest(bundle=task.bundle, verdict=verdict, rewards=rewards, num_tokens=rollouts.num_tokens)
        )


async def publish(world: World, source: MemorySource, version: int, batch: str | None) -> None:
    """Publish as the trainer does: first the bytes, then the manifest."""
    trainer = world.client(TRAINER)
    provenance = {"step": version - 1, "optimizer_steps": version, "batch": batch, "software": "test"}
    signed = source.publish(table_weights(version), produced_by=provenance)
    for blob in signed.manifest.blobs:
        await trainer.put_blob(source.blobs[blob.digest])
    await trainer.publish(signed.envelope)


async def train(world: World, source: MemorySource) -> list[TrainBatch]:
    """Publish policy 0, take the batch of each step and publish the policy after it."""
    batches = []
    await publish(world, source, 0, None)
    for step in range(RUN.spec.max_steps):
        while not isinstance(
            answer := await world.client(TRAINER).batch(BatchRequest(step=step, durable_step=step, wait_s=1.0)),
            Envelope,
        ):
            pass
        batches.append(parse_json(answer.payload, TrainBatch))
        await publish(world, source, step + 1, answer.digest)
    return batches


async def serving_parts() -> Parts:
    """Return the parts of a coordinator in memory that has the run's model files."""
    parts = dataclasses.replace(memory_parts(RUN), key=COORDINATOR, environments={"toy": Letters()}, tokenizer=Digits())
    for data in MODEL_FILES.values():
        await parts.public.put(data)
    return parts


async def work_through(
    world: World, folder: Path, *, client: HttpClient | None = None, say: Callable[[str], None] = lambda line: None
) -> tuple[Worker, list[TrainBatch]]:
    """Run a whole run with one worker, and return the worker and the batch of each step. `say` gets its status lines."""
    clock, client, rng = world.parts.clock, client or world.client(WORKER), random.Random(1)
    pool = SourcePool([("http", client)], clock=clock, rng=rng)
    pinned = await fetch_run(RUN.digest, client, clock=clock)
    worker = Worker(
        run=pinned,
        config=WorkerConfig.model_validate({"rollouts_max": 8, "receipts_seconds": 3_600.0, "status_seconds": 0.2}),
        key=WORKER,
        coordinator=client,
        engine_info=TableEngine().info,
        equip=equipped(TableEngine()),
        follower=Follower(pinned, pool, folder / "c", clock=clock, poll_s=0.05, rng=rng),
        trust=Trust(pinned, [("http", client)], folder / "trust", clock=clock, rng=rng),
        folder=folder,
        clock=clock,
        rng=rng,
        say=say,
    )
    working = asyncio.create_task(run_worker(worker, asyncio.Event()))
    validating = asyncio.create_task(validate(world.client(COORDINATOR)))
    batches = await train(world, MemorySource(RUN))
    await until(working.done)
    assert await working is Ending.DRAINED
    validating.cancel()
    return worker, batches
