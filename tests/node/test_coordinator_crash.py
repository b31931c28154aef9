"""kill -9 at any moment loses no accepted rollout and accepts none twice. A real daemon process, really killed, under load."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import aiohttp
import pytest
from tests.node.coordinator_process import crash_run, start
from tests.node.coordinator_world import World, make_run, memory_parts
from tests.node.crowd_world import Crowd, check_promises

from prime_lab.postgres_server import PASSWORD
from prime_lab.s3_server import BUCKET

KILLS = 6


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", ["embedded", "services"])
async def test_a_killed_daemon_loses_nothing_that_it_acknowledged(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    seed, settings, environment = 1, dict[str, str](), dict[str, str]()
    if kind == "services":
        url = request.getfixturevalue("postgres").make_database()
        settings = {"store": url, "blobs": f"s3://{BUCKET}/{tmp_path.name}", "term_seconds": "0.5"}
        environment = {"PGPASSWORD": PASSWORD, **request.getfixturevalue("s3").environment}
    chance = random.Random(seed)
    process, port = await start(tmp_path, 0, settings=settings, environment=environment)
    run = make_run(**crash_run())
    async with aiohttp.ClientSession() as session:
        world = World(run, memory_parts(run), f"http://127.0.0.1:{port}", session)
        crowd = Crowd(world, seed)
        try:
            async with crowd.working():
                for _ in range(KILLS):
                    await crowd.pause(chance.uniform(0.2, 1.0))
                    process.kill()
                    await process.wait()
                    process, _ = await start(tmp_path, port, settings=settings, environment=environment)
                # It continues as before. On a busy machine little was done between the kills.
                await crowd.progress(3, batches_min=6, accepted_min=11)
                await crowd.stop()
                await check_promises(crowd)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
