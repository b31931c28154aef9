"""Reads of the store: those of strangers delay no member, and a read that gets no place is refused in time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import pytest
from tests.node.coordinator_world import ANNA, folder_parts, make_run, running
from tests.time_world import until

from prime_lab.postgres_server import PostgresServer
from prime_node.coordinator.api import limiter
from prime_node.ports.web import Sender
from prime_protocol.requests import ReceiptsRequest

STRANGERS = 12
"""More than the connections of the store."""


@pytest.mark.timeout(30)
async def test_reads_of_strangers_hold_up_no_member_and_are_refused_in_time(
    postgres: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, all reads of PostgreSQL had the same three places, and waited for one without end."""
    monkeypatch.setattr(limiter, "PLACE_S_MAX", 0.5)
    url = postgres.make_database()
    async with running(await folder_parts(make_run(), tmp_path, store=url)) as world:
        await world.publish()
        await world.join(ANNA)
        other = await asyncpg.connect(url)
        async with other.transaction():
            await other.execute("LOCK TABLE ledger")
            reading = [asyncio.ensure_future(world.get("/v1/ledger/0")) for _ in range(STRANGERS)]
            await until(lambda: sum(each.done() for each in reading) == STRANGERS - 1)
            listed = await world.client(ANNA).receipts(ReceiptsRequest())
            assert listed.receipts == ()
        await other.close()
        found = [(status, headers.get("Retry-After")) for status, _, headers in await asyncio.gather(*reading)]
        assert sorted(found, key=str) == [(200, None), *[(503, "1")] * (STRANGERS - 1)]


async def test_a_member_with_many_reads_delays_another_by_one_of_them() -> None:
    """Before, all reads of members had one queue: a burst of one member's kept every other member out."""
    reads, order = limiter.StoreReads(), list[str]()

    async def read(key: str) -> None:
        async with reads.place(Sender(key, is_role=False)):
            order.append(key)
            await asyncio.sleep(0)

    await asyncio.gather(*(read(key) for key in ["many"] * 50 + ["few"]))
    assert order.index("few") <= 1
    assert order.count("many") == 50
