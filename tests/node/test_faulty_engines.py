"""A worker whose engine computes something else than its policy: nothing of it is signed, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.memory_coordinator import WorkerWorld
from tests.node.table_engine import TableEngine, table_weights

from prime_lab.adversaries.table import ADVERSARIES
from prime_node.ports.engine import GenerateRequest
from prime_node.worker.loop import run_worker
from prime_node.worker.worker import Ending
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion
from prime_protocol.verdict import RejectReason


@pytest.mark.parametrize("cheat", ["altered", "stale"])
async def test_a_cheating_worker_is_refused_for_its_logprobs(tmp_path: Path, cheat: str) -> None:
    world = WorkerWorld(tmp_path)

    def publish_or_stop() -> None:
        if len(world.coordinator.manifests) == 1:
            world.coordinator.publish_policy(table_weights(1))
        if any(not verdict.accepted for verdict in world.coordinator.verdicts.values()):
            world.stop.set()

    world.coordinator.after_upload = publish_or_stop
    await run_worker(world.worker(ADVERSARIES[cheat].engine_around(TableEngine())), world.stop)
    reasons = {verdict.reason for verdict in world.coordinator.verdicts.values() if not verdict.accepted}
    assert reasons == {RejectReason.LOGPROB_MISMATCH}


async def test_an_engine_that_computes_something_else_is_loaded_again_and_then_used(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    world.stop_when(lambda: world.coordinator.accepted >= 1)
    assert await run_worker(world.worker(TableEngine(loads_that_fail=1)), world.stop) is Ending.STOPPED
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())


async def test_no_bundle_is_signed_with_logprobs_that_are_no_numbers(tmp_path: Path) -> None:
    """Before, a fault of the memory, or a policy that overflows on a prompt, was a strike for `malformed` at each such lease.

    The lease is returned as failed: if it fails on other machines too, its slots draw other problems.
    """
    world = WorkerWorld(tmp_path)
    faults = [math.nan, math.inf, -math.inf]

    class Overflowing(TableEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            first, *others = await super().generate(requests, sampling)
            if world.coordinator.leases and faults:
                first = replace(first, logprobs=(*first.logprobs[:-1], faults.pop()))
            return [first, *others]

    world.stop_when(lambda: world.coordinator.accepted >= 2)
    assert await run_worker(world.worker(Overflowing()), world.stop) is Ending.STOPPED
    assert not faults
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())
    assert len(world.coordinator.failed) == 3


async def test_an_engine_that_keeps_computing_something_else_ends_the_worker_without_an_upload(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    with pytest.raises(LocalError, match="does not compute policy 0"):
        await run_worker(world.worker(TableEngine(loads_that_fail=99)), world.stop)
    assert world.coordinator.verdicts == {}
    assert world.status()["ended"] == "failed"
