"""The primary of the database dies: what was acknowledged is on its synchronous standby. Real servers and processes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import pytest
from tests.node.coordinator_process import crash_run
from tests.node.coordinator_world import ANNA, BEN, TRAINER, VALIDATOR, World, make_run, memory_parts
from tests.node.crowd_world import Crowd, check_promises
from tests.node.standby_world import Pair

from prime_lab.postgres_server import NO_FSYNC, PASSWORD, postgres_server, synchronous_standby
from prime_lab.s3_server import BUCKET, S3Server


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_killed_primary_of_postgresql_loses_nothing_that_was_acknowledged(tmp_path: Path, s3: S3Server) -> None:
    with contextlib.ExitStack() as stack:
        primary = await asyncio.to_thread(stack.enter_context, postgres_server(*NO_FSYNC))
        standby = await asyncio.to_thread(stack.enter_context, synchronous_standby(primary))
        database = primary.make_database()
        store = database.replace(f":{primary.port}/", f":{primary.port},127.0.0.1:{standby.port}/")
        settings = {
            "store": f"{store}?target_session_attrs=read-write",
            "blobs": f"s3://{BUCKET}/{tmp_path.name}",
            "standby": "true",
            "term_seconds": "1.0",
        }
        pair = Pair(tmp_path, settings, {"PGPASSWORD": PASSWORD, **s3.environment})
        await pair.start(0)
        await pair.start(1)
        run = make_run(**crash_run())
        async with aiohttp.ClientSession() as session:
            leads = await pair.leader(session)
            crowd = Crowd(World(run, memory_parts(run), pair.urls[leads], session), 1)
            for key in (ANNA, BEN, VALIDATOR, TRAINER):
                crowd.world.client(key).also_at(pair.urls)
            try:
                async with crowd.working():
                    await crowd.progress(4, accepted_min=11)
                    await asyncio.to_thread(primary.stop, "immediate")
                    await pair.daemons[leads].wait()
                    await asyncio.to_thread(standby.promote)
                    await pair.leader(session)  # one of them ended with exit code 6, and is started again
                    await crowd.progress(3)
                    await crowd.stop()
                    await check_promises(crowd)
            finally:
                await pair.kill()
