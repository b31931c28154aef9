"""A leader that no longer reaches the store, and does not learn of it, and a standby whose clock is wrong. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import aiohttp
import pytest
from tests.node.coordinator_process import crash_run
from tests.node.coordinator_world import ANNA, BEN, ENGINE, TRAINER, VALIDATOR, World, make_run, memory_parts
from tests.node.crowd_world import Crowd, check_promises, persist
from tests.node.ledger_world import receipts_of
from tests.node.silent_line_world import silent_line
from tests.node.standby_world import Pair

from prime_lab.postgres_server import PASSWORD, PostgresServer
from prime_lab.s3_server import BUCKET, S3Server
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web import http_exchange
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.audit.ledger_audit import audit_ledger
from prime_protocol.requests import JoinRequest

LONG_S, ENOUGH_S = 300.0, 60.0
"""Time for which a client would wait; and much more than it needs."""


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_a_leader_that_is_cut_off_from_the_store_answers_nothing_and_the_next_one_contradicts_it_nowhere(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    run, url, settings = make_run(**crash_run()), postgres.make_database(), {"standby": "true", "term_seconds": "1.0"}
    settings["blobs"] = f"s3://{BUCKET}/{tmp_path.name}"
    async with contextlib.AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(silent_line(postgres.port)) for _ in range(2)]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        stores = [url.replace(f":{postgres.port}/", f":{line.port}/") for line in lines]
        environment = {"PGPASSWORD": PASSWORD, **s3.environment}
        pair = Pair(tmp_path, settings, environment, stores=stores, clocks_ahead_s=(0.0, -40.0))
        stack.push_async_callback(pair.kill)
        await pair.start(0)
        await pair.start(1)
        first = await pair.leader(session)
        crowd = Crowd(World(run, memory_parts(run), pair.urls[first], session), 1)
        for key in (ANNA, BEN, VALIDATOR, TRAINER):
            crowd.world.client(key).also_at(pair.urls)
        async with crowd.working():
            await crowd.progress(3, accepted_min=11)
            lines[first].fall_silent()

            async def has_taken_over() -> bool:
                return await pair.is_ready(session, 1 - first)

            await crowd.world.until(has_taken_over)
            assert not await pair.is_ready(session, first), "two leaders"
            await crowd.progress(3)
            assert pair.daemons[first].is_alive
            lines[first].be_heard()
            await pair.daemons[first].wait()
            await crowd.stop()
            await check_promises(crowd)
            receipts = await receipts_of(crowd.world)
            report = await audit_ledger(crowd.world.client(ANNA), run, receipts=receipts)
    assert (report.faults, report.notes) == ([], [])
    assert report.num_receipts > 5


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_clients_of_a_leader_that_is_cut_off_from_the_store_go_to_the_next_one_before_their_patience_ends(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, each waited for ten seconds: what was asked before the cut has no answer, and no connection ends."""
    monkeypatch.setattr(http_exchange, "ELSEWHERE_STALL_S", LONG_S)
    run, url = make_run(**crash_run()), postgres.make_database()
    settings = {"standby": "true", "term_seconds": "1.0", "blobs": f"s3://{BUCKET}/{tmp_path.name}"}
    async with contextlib.AsyncExitStack() as stack:
        lines = [await stack.enter_async_context(silent_line(postgres.port)) for _ in range(2)]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        stores = [url.replace(f":{postgres.port}/", f":{line.port}/") for line in lines]
        pair = Pair(tmp_path, settings, {"PGPASSWORD": PASSWORD, **s3.environment}, stores=stores)
        stack.push_async_callback(pair.kill)
        await pair.start(0)
        await pair.start(1)
        first = await pair.leader(session)
        asked = JoinRequest(name="anna", software="1", engine=ENGINE, rollouts_max=64)
        lines[first].fall_silent()
        client = HttpClient(pair.urls[first], run=run.digest, clock=SystemClock(), key=ANNA, stall_s=LONG_S)
        client.also_at(pair.urls)
        async with client, asyncio.timeout(ENOUGH_S):
            await persist(lambda: client.join(asked))
        assert client.url == pair.urls[1 - first]
