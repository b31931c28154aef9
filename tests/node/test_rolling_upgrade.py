"""Standby, leader and gateways are replaced one by one while peers work: nothing acknowledged is lost or taken twice."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest
from tests.node.coordinator_process import crash_run
from tests.node.coordinator_world import ANNA, BEN, TRAINER, VALIDATOR, World, make_run, memory_parts
from tests.node.crowd_world import Crowd, check_promises
from tests.node.gateway_world import gateway_parts, serving
from tests.node.standby_world import pair_for_gateways

from prime_lab.postgres_server import PostgresServer
from prime_lab.s3_server import BUCKET, S3Server
from prime_node.cli.wire_store import open_blobs
from prime_protocol.run_spec import PinnedRun


class Gateways:
    """Gateways at addresses that stay."""

    def __init__(self, run: PinnedRun, writers: Sequence[int], blobs: str) -> None:
        self.urls: list[str] = []
        self._run, self._writers, self._blobs = run, writers, blobs
        self._open: list[contextlib.AsyncExitStack] = []

    async def start(self, place: int) -> None:
        bundles, public = [await open_blobs(self._blobs, self._run, Path(name)) for name in ("bundles", "blobs")]
        port = int(self.urls[place].rpartition(":")[2]) if place < len(self.urls) else 0
        parts = gateway_parts(self._run, self._writers, bundles=bundles, public=public, blobs=self._blobs, port=port)
        stack = contextlib.AsyncExitStack()
        url = await stack.enter_async_context(serving(parts))
        self.urls[place:] = [url, *self.urls[place + 1 :]]
        self._open[place:] = [stack, *self._open[place + 1 :]]

    async def stop(self, place: int) -> None:
        await self._open[place].aclose()

    @contextlib.asynccontextmanager
    async def serving(self, count: int) -> AsyncIterator[None]:
        try:
            for place in range(count):
                await self.start(place)
            yield
        finally:
            for stack in self._open:
                await stack.aclose()


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_leader_standby_and_gateways_are_replaced_under_load_without_loss(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    run, blobs = make_run(**crash_run()), f"s3://{BUCKET}/{tmp_path.name}"
    pair = pair_for_gateways(tmp_path, blobs, postgres, s3)
    await pair.start(0)
    await pair.start(1)
    gateways = Gateways(run, pair.link_ports, blobs)

    async def replace_coordinator(place: int) -> None:
        pair.daemons[place].send(signal.SIGINT)
        await pair.daemons[place].wait()
        await pair.start(place, pair.ports[place])

    async with aiohttp.ClientSession() as session:
        leads = await pair.leader(session)
        async with gateways.serving(2):
            world = World(run, memory_parts(run), gateways.urls[0], session)
            for key in (ANNA, BEN, VALIDATOR, TRAINER):
                world.client(key).also_at(gateways.urls)
            crowd = Crowd(world, 1)
            try:
                async with crowd.working():
                    await crowd.progress(2)
                    for place in (1 - leads, leads):
                        await replace_coordinator(place)
                        await crowd.progress(2)
                    for place in range(2):
                        await gateways.stop(place)
                        await crowd.progress(1)  # through the other one
                        await gateways.start(place)
                        await crowd.progress(1)
                    await crowd.stop()
                    await check_promises(crowd)
            finally:
                await pair.kill()
