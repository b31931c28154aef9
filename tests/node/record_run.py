"""Record the folder of a run, as a kill leaves it: coordinator and worker in the middle of a step.

test_upgrade.py continues it with today's code. A recording is made by the code of an earlier commit:

    git archive COMMIT | tar x -C OLD
    cp tests/node/record_run.py OLD/tests/node/
    cd OLD && PYTHONPATH=.:node:protocol:lab python -m tests.node.record_run FOLDER
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
import time
from pathlib import Path

from tests.node.coordinator_world import ANNA, BEN, folder_parts, make_parcel, make_run, running

from prime_node.adapters.system_clock import SystemClock
from prime_node.worker.receipts import ReceiptBook
from prime_node.worker.spool import Spool
from prime_protocol.requests import ReceiptsRequest
from prime_protocol.verdict import RejectReason


async def record(folder: Path) -> None:
    """Run a while in `folder`.run, and keep a copy of its files in `folder`."""
    run, work = make_run(), Path(f"{folder}.run")
    async with running(await folder_parts(run, work / "coordinator", snapshot_events=10)) as world:
        await world.join(ANNA, BEN)
        await world.publish()
        await world.fill(0)
        await world.get("/v1/ledger")
        lease = await world.lease(BEN, rollouts_max=2)
        await world.client(BEN).upload(make_parcel(lease, BEN))
        await world.judge(reason=RejectReason.UNVERIFIABLE)
        await world.publish()
        assert world.head is not None
        book = ReceiptBook(work / "worker", run=run, worker=ANNA.key_id)
        book.add(await world.client(ANNA).receipts(ReceiptsRequest()), now_ms=SystemClock().now_ms())
        lease = await world.lease(ANNA, rollouts_max=2)
        spool = Spool(work / "worker" / "spool", bytes_max=2**20, clock=SystemClock(), rng=random.Random(1))
        await spool.put(make_parcel(lease, ANNA), lease.lease_id)
        summary = {"at_ms": time.time_ns() // 1_000_000, "receipts": book.cursor, "run": run.digest}
        await asyncio.to_thread((work / "recorded.json").write_text, json.dumps(summary), encoding="utf-8")
        await asyncio.to_thread(shutil.copytree, work, folder, ignore=shutil.ignore_patterns("*-shm"))


if __name__ == "__main__":
    asyncio.run(record(Path(sys.argv[1])))
