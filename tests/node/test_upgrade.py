"""Runs that earlier code left in the middle of a step continue with today's code, role by role, and nothing is lost.

`recorded/run-COMMIT.tar.xz` was made by the code of that commit (record_run.py). A change of a stored form adds a recording of
the commit before it; those that exist stay.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.archive_world import RECORDED, unpacked
from tests.node.coordinator_world import ANNA, TRAINER, folder_parts, running
from tests.node.spool_world import flush_all, make_spool

from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.audit.audit import audit
from prime_node.worker.receipts import ReceiptBook
from prime_protocol.digest import digest_of
from prime_protocol.envelope import open_envelope
from prime_protocol.ledger import LedgerChain
from prime_protocol.manifest import open_manifest
from prime_protocol.requests import ReceiptsRequest
from prime_protocol.run_spec import open_run_spec


class RecordedClock(SystemClock):
    """A clock that continues at the time of a recording."""

    def __init__(self, at_ms: int) -> None:
        self._ahead_ms = at_ms - time.time_ns() // 1_000_000

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms


@pytest.mark.parametrize("archive", sorted(RECORDED.glob("run-*.tar.xz")), ids=lambda path: path.name.split(".")[0])
async def test_a_run_of_earlier_code_continues_and_keeps_all_that_was_promised(tmp_path: Path, archive: Path) -> None:
    recorded = await asyncio.to_thread(unpacked, archive, tmp_path)
    public = tmp_path / "coordinator" / "public"
    run_file, head_file = public / "run.json", public / "head.json"
    run = open_run_spec(open_envelope(await asyncio.to_thread(run_file.read_bytes)), pinned=str(recorded["run"]))
    head = open_manifest(open_envelope(await asyncio.to_thread(head_file.read_bytes)), run)
    book = ReceiptBook(tmp_path / "worker", run=run, worker=ANNA.key_id)
    assert (book.cursor, book.tally().accepted) == (recorded["receipts"], 8)
    assert isinstance(recorded["at_ms"], int)
    clock = RecordedClock(recorded["at_ms"])
    parts = replace(await folder_parts(run, tmp_path / "coordinator"), clock=clock)
    async with running(parts) as world:
        world.head = head
        before = await parts.store.ledger(start=0, limit=1_000)
        assert len(before) == 3
        spool = make_spool(tmp_path / "worker" / "spool")
        assert spool.num_bundles == 1
        await flush_all(spool, world.client(ANNA).upload)
        await world.judge()
        book.add(await world.client(ANNA).receipts(ReceiptsRequest(after=book.cursor)), now_ms=clock.now_ms())
        assert book.tally().accepted > 8
        await world.fill(1)
        assert (await world.publish()).manifest.policy_version == 2
        after = await parts.store.ledger(start=0, limit=1_000)
        assert after[: len(before)] == before
        chain = LedgerChain(run.digest)
        for line in after:
            chain.follow(line.encode())
        assert digest_of(after[-1].encode()) == chain.digest
        ended = await world.client(TRAINER).head()
        assert ended is not None
    report = await audit(FolderSource(public), run.digest, chain=True, now_ms=clock.now_ms())
    assert [check.number for check in report.checks if check.passed][:7] == [1, 2, 3, 4, 5, 6, 7]
