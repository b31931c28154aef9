"""A worker joins before its engine is built, because building one imports for seconds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.memory_coordinator import WorkerWorld
from tests.node.table_engine import TableEngine
from tests.node.worker_world import make_run
from tests.time_world import until

from prime_node.worker.loop import run_worker
from prime_node.worker.worker import Ending, Equipment
from prime_protocol.errors import LocalError


class Building:
    """An engine that is built once `go` is set."""

    def __init__(self, fault: LocalError | None = None) -> None:
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self._fault = fault

    async def equip(self) -> Equipment:
        self.begun.set()
        await self.go.wait()
        if self._fault is not None:
            raise self._fault
        return Equipment(TableEngine())


async def test_a_worker_has_joined_and_sends_heartbeats_while_its_engine_is_built(tmp_path: Path) -> None:
    world, building = WorkerWorld(tmp_path, pinned=make_run(heartbeat_seconds=50.0)), Building()
    world.stop_when(lambda: world.coordinator.accepted >= 1)
    worker = world.worker(equip=building.equip)
    working = asyncio.create_task(run_worker(worker, world.stop))
    await building.begun.wait()
    assert world.coordinator.engines == [TableEngine().info]
    assert "joined; the engine is loading" in world.said
    await until(lambda: worker.follower.latest() is not None)  # the download does not wait for the engine
    beats, lines = len(world.coordinator.beats), len(world.said)
    await until(lambda: len(world.coordinator.beats) > beats + 2 and len(world.said) > lines + 1)
    assert world.coordinator.leases == {}
    assert "waiting: the engine is being loaded" in world.said[-1]
    building.go.set()
    assert await working is Ending.STOPPED
    assert world.coordinator.accepted >= 1
    assert world.coordinator.joined == 1


async def test_an_engine_that_cannot_be_built_ends_the_worker_which_leaves(tmp_path: Path) -> None:
    world, building = WorkerWorld(tmp_path, policies=0), Building(LocalError("the model is too large"))
    building.go.set()
    with pytest.raises(LocalError, match="the model is too large"):
        await run_worker(world.worker(equip=building.equip), world.stop)
    assert world.coordinator.joined == 1
    assert world.coordinator.left
    assert world.status()["ended"] == "failed"


async def test_an_engine_in_the_making_does_not_delay_a_stop(tmp_path: Path) -> None:
    world, building = WorkerWorld(tmp_path), Building()
    working = asyncio.create_task(run_worker(world.worker(equip=building.equip), world.stop))
    await building.begun.wait()
    world.stop.set()
    assert await working is Ending.STOPPED
    assert world.coordinator.left


async def test_an_engine_other_than_the_announced_one_joins_again_under_its_own_name(tmp_path: Path) -> None:
    world, own = WorkerWorld(tmp_path), TableEngine().info
    announced = own.model_copy(update={"version": "0"})
    world.stop_when(lambda: world.coordinator.accepted >= 1)
    await run_worker(world.worker(announced=announced), world.stop)
    assert world.coordinator.engines == [announced, own]
    assert world.coordinator.accepted >= 1
