"""What a trainer says while its batch is not complete."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from tests.node.batch_coordinator import BatchCoordinator, make_run
from tests.node.trainer_world import make_trainer
from tests.time_world import turns, until

from prime_node.trainer.loop import run_trainer
from prime_protocol.envelope import Envelope
from prime_protocol.replies import NotYet
from prime_protocol.requests import BatchRequest


class LateCoordinator(BatchCoordinator):
    """Coordinator that has no batch for a while."""

    is_late = True

    async def batch(self, request: BatchRequest) -> Envelope | NotYet:
        if self.is_late:
            await turns()
            return NotYet(reason="2 groups are open", retry_after_s=0.1)
        return await super().batch(request)


async def test_a_trainer_that_waits_says_in_one_line_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("prime_node.trainer.loop.SAY_S", 0.05)
    caplog.set_level(logging.INFO)
    coordinator = LateCoordinator(make_run(max_steps=1))
    training = asyncio.create_task(run_trainer(make_trainer(tmp_path, coordinator), asyncio.Event()))
    await until(lambda: "s: 2 groups are open" in caplog.text, seconds=60.0)
    coordinator.is_late = False
    assert await training
    lines = [record.getMessage() for record in caplog.records if "step 0: waiting for rollouts" in record.getMessage()]
    assert lines
    assert sum("are open" in record.getMessage() for record in caplog.records) <= len(lines)
