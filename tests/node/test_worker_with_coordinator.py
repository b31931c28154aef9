"""The real worker loop and follower against the real coordinator daemon over HTTP: two steps of a whole run."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

from tests.node.coordinator_world import Letters, World, memory_parts, running
from tests.node.served_world import RUN, Digits, publish, validate
from tests.node.table_engine import TableEngine, equipped
from tests.node.worker_world import COORDINATOR, MODEL_FILES, TRAINER, WORKER, MemorySource
from tests.time_world import until

from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.pinned import fetch_run
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.worker.config import WorkerConfig
from prime_node.worker.loop import run_worker
from prime_node.worker.worker import Ending, Worker
from prime_protocol.envelope import Envelope, parse_json
from prime_protocol.replies import TrainBatch
from prime_protocol.requests import BatchRequest


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


async def test_a_worker_serves_a_whole_run_over_http_and_the_result_verifies(tmp_path: Path) -> None:
    parts = dataclasses.replace(memory_parts(RUN), key=COORDINATOR, environments={"toy": Letters()}, tokenizer=Digits())
    for data in MODEL_FILES.values():
        await parts.public.put(data)
    async with running(parts) as world:
        client, rng = world.client(WORKER), random.Random(1)
        pool = SourcePool([("http", client)], clock=parts.clock, rng=rng)
        pinned = await fetch_run(RUN.digest, client, clock=parts.clock)
        worker = Worker(
            run=pinned,
            config=WorkerConfig.model_validate({"rollouts_max": 8, "receipts_seconds": 3_600.0}),
            key=WORKER,
            coordinator=client,
            engine_info=TableEngine().info,
            equip=equipped(TableEngine()),
            follower=Follower(pinned, pool, tmp_path / "c", clock=parts.clock, poll_s=0.05, rng=rng),
            trust=Trust(pinned, [("http", client)], tmp_path / "trust", clock=parts.clock, rng=rng),
            folder=tmp_path,
            clock=parts.clock,
            rng=rng,
        )
        working = asyncio.create_task(run_worker(worker, asyncio.Event()))
        validating = asyncio.create_task(validate(world.client(COORDINATOR)))
        batches = await train(world, MemorySource(RUN))
        await until(working.done)
        assert await working is Ending.DRAINED
        validating.cancel()

        assert [len(batch.groups) for batch in batches] == [RUN.spec.groups_per_step] * RUN.spec.max_steps
        tally = worker.receipts.tally()
        assert tally.accepted == RUN.spec.max_steps * 8, "the last receipts are fetched before leaving"
        assert tally.refused == {}
        report = await audit(client, RUN.digest, chain=True, now_ms=parts.clock.now_ms())
        assert report.passed, report.failure
        assert report.policy_version == RUN.spec.max_steps
