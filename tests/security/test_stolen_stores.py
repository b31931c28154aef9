"""Who can write in the run's store gets no signature of the coordinator on what it wrote, nor two leaders of one term."""

from __future__ import annotations

from functools import partial

import asyncpg
import pytest
from tests.node.coordinator_world import ANNA, BEN, ROOT, VALIDATOR, make_run, memory_parts, running
from tests.node.ledger_world import receipts_of
from tests.node.seed_chain_world import leased_and_judged
from tests.node.worker_world import next_ring
from tests.time_world import until

from prime_lab.postgres_server import PostgresServer, open_postgres
from prime_node.adapters.storage.postgres_leader import TermKeeper
from prime_node.ports.store import StoredReceipt
from prime_protocol.envelope import PayloadType, parse_json, seal
from prime_protocol.verdict import BundleStatus, Receipt


async def test_no_receipt_that_another_has_put_into_the_store_gets_a_signature(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before, after a key ring it signed any receipt in its store again: a forged one, absent in the ledger, convicts it."""
    parts = memory_parts(make_run())
    async with running(parts) as world:
        _, genuine = await leased_and_judged(world)
        assert world.head is not None
        ring = next_ring(world.run.keys, ROOT, published=world.head.point, validator=(VALIDATOR, BEN))
        await world.client(ROOT).add_key_ring(ring)
        fields = {"bundle": "f" * 64, "lease_id": "e" * 64, "num_tokens": 10**6}
        forged = parse_json(genuine.payload, Receipt).model_copy(update=fields)
        text = seal(forged, PayloadType.RECEIPT, BEN).to_bytes().decode()
        stored = StoredReceipt(forged.bundle, forged.lease_id, ANNA.key_id, 0, BundleStatus.ACCEPTED, text)
        await parts.store.append((), [stored])
        assert [one.payload for one in await receipts_of(world)] == [genuine.payload]
    assert "a receipt in the store is not the coordinator's" in caplog.text


class Line:
    """Connections to a database that a test can cut."""

    def __init__(self, server: PostgresServer, url: str) -> None:
        self._server, self._url, self.is_cut = server, url, False

    async def connect(self) -> asyncpg.Connection:
        if self.is_cut:
            raise ConnectionRefusedError
        return await asyncpg.connect(self._url, server_settings={"application_name": "cut"})

    def cut(self) -> None:
        """End the connections, and refuse further ones."""
        self.is_cut = True
        self._server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'cut'")


async def test_no_term_has_the_number_of_one_that_the_database_has_lost(postgres: PostgresServer) -> None:
    """A failover to an older copy. Before, the leader that was cut off and the next one had one number, and both could write."""
    url, place = postgres.make_database(), "db"
    await (await open_postgres(url, run="ab" * 32)).close()
    database, line = url.rsplit("/", 1)[1], Line(postgres, url)
    older = postgres.execute("SELECT epoch FROM leader", database=database).strip()
    first = TermKeeper(line.connect, term_s=1.0, place=place)
    await first.begun(is_patient=True)
    line.cut()
    postgres.execute(f"UPDATE leader SET epoch = {older}, term_ms = 0", database=database)
    second = TermKeeper(partial(asyncpg.connect, url), term_s=1.0, place=place)
    try:
        await second.begun(is_patient=True)
        assert first.epoch != second.epoch
        line.is_cut = False
        await until(lambda: first.is_lost)
        assert second.may_answer()
    finally:
        await first.end()
        await second.end()
