"""The real worker loop and follower against the real coordinator daemon over HTTP: two steps of a whole run."""

from __future__ import annotations

from pathlib import Path

from tests.node.coordinator_world import running
from tests.node.served_world import RUN, serving_parts, work_through
from tests.node.worker_world import WORKER

from prime_node.broadcast.audit.audit import audit


async def test_a_worker_serves_a_whole_run_over_http_and_the_result_verifies(tmp_path: Path) -> None:
    async with running(await serving_parts()) as world:
        worker, batches = await work_through(world, tmp_path)
        assert [len(batch.groups) for batch in batches] == [RUN.spec.groups_per_step] * RUN.spec.max_steps
        tally = worker.receipts.tally()
        assert tally.accepted == RUN.spec.max_steps * 8, "the last receipts are fetched before leaving"
        assert tally.refused == {}
        report = await audit(world.client(WORKER), RUN.digest, chain=True, now_ms=world.parts.clock.now_ms())
        assert report.passed, report.failure
        assert report.policy_version == RUN.spec.max_steps
