"""Roles with the answers of a real coordinator over HTTP, where a fake of its client once answered otherwise."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

from tests.node.coordinator_world import (
    ANNA,
    TRAINER,
    LongTexts,
    make_parcel,
    make_run,
    memory_parts,
    running,
    running_with_anna,
)
from tests.node.spool_world import flush_all
from tests.time_world import VirtualClock

from prime_node.adapters.web.http_client import HttpClient
from prime_node.training_data.feed import Feed
from prime_node.worker.spool import Spool
from prime_protocol.digest import digest_of
from prime_protocol.limits import ENVELOPE_BYTES_MAX
from prime_protocol.replies import UploadReply

HOUR_S = 3_600.0


class WrongClock(VirtualClock):
    """Clock of a machine that is ahead until its owner corrects it, after a number of pauses."""

    def __init__(self, now_ms: int, *, pauses: int) -> None:
        super().__init__()
        self._right_ms, self._pauses = now_ms, pauses

    def now_ms(self) -> int:
        return self._right_ms + (round(1_000 * HOUR_S) if self._pauses else 0)

    async def sleep(self, seconds: float) -> None:
        self._pauses = max(0, self._pauses - 1)
        await super().sleep(seconds)


async def test_finished_work_is_kept_while_the_machines_clock_is_wrong(tmp_path: Path) -> None:
    """An upload that the coordinator refused as too old, or as too far ahead, was deleted as if it had been judged."""
    async with running_with_anna() as world:
        lease = await world.lease(ANNA)
        parcel, clock = make_parcel(lease, ANNA), WrongClock(world.parts.clock.now_ms(), pauses=5)
        spool = Spool(tmp_path, bytes_max=2**20, clock=clock, rng=random.Random(1))
        await spool.put(parcel, lease.lease_id)
        async with HttpClient(world.url, run=world.run.digest, clock=clock, key=ANNA) as client:
            await flush_all(spool, client.upload)
        assert not (tmp_path / "refused.jsonl").exists()
        assert await world.client(ANNA).upload(parcel) == UploadReply(bundle=digest_of(parcel), verdict=None)
        assert (await world.status())["pending_bundles"] == 1


async def test_leases_checks_and_batches_of_long_prompts_arrive() -> None:
    """Their answers were longer than a client reads: workers lost their leases, and the trainer asked forever."""
    run = make_run(groups_per_step=128, rollouts_per_group=1)
    async with running(replace(memory_parts(run), environments={"letters": LongTexts()}), ANNA) as world:
        lease = await world.lease(ANNA, rollouts_max=128)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        task = await world.judge()
        assert len(task.model_dump_json()) > ENVELOPE_BYTES_MAX
        feed = Feed(world.client(TRAINER), run, clock=world.parts.clock)
        try:
            async with asyncio.timeout(30.0):
                assert len((await feed.take(0)).groups) == 128
        finally:
            await feed.close()
