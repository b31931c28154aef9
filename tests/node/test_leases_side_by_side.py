"""Several leases in one engine: room, order of uploads, the run's limit, policy swaps, and the end of a worker."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.node.memory_coordinator import WorkerWorld
from tests.node.table_engine import table_weights
from tests.node.together_world import LEASE, SwappingTogether, Together
from tests.node.worker_world import make_run, names_in
from tests.time_world import until

from prime_node.ports.engine import EngineMismatch
from prime_node.worker.loaded_policy import LoadedPolicy
from prime_node.worker.loop import run_worker
from prime_node.worker.worker import Ending
from prime_protocol.schedule import SwapPolicy


async def turns() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_the_engine_is_filled_from_several_leases_and_each_is_uploaded_when_it_is_finished(
    tmp_path: Path,
) -> None:
    world, engine = WorkerWorld(tmp_path), Together(2 * LEASE)
    working = asyncio.create_task(run_worker(world.worker(engine), world.stop))
    await until(lambda: len(engine.calls) == 2)
    await turns()
    assert len(engine.calls) == 2, "there is no room for a third"
    engine.calls[1].set()
    await until(lambda: world.coordinator.accepted == 1 and len(engine.calls) == 3)
    assert not engine.calls[0].is_set()
    engine.release_all()
    world.stop.set()
    assert await working is Ending.STOPPED
    assert world.coordinator.accepted == len(world.coordinator.verdicts) == len(engine.calls)


async def test_a_worker_holds_at_most_as_many_open_leases_as_the_run_allows(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Together(1_000 * LEASE)
    worker = world.worker(engine)
    working = asyncio.create_task(run_worker(worker, world.stop))
    allowed = world.coordinator.run.spec.limits.leases_per_worker_max
    await until(lambda: len(engine.calls) == allowed)
    await world.clock.sleep(100.0)
    assert len(world.coordinator.leases) == len(worker.activity.in_hand) == allowed
    engine.release_all()
    world.stop.set()
    await working


async def test_a_policy_is_loaded_once_all_leases_of_the_former_one_are_finished(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Together(2 * LEASE)
    worker = world.worker(engine, leases_ahead=0)
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: len(engine.calls) == 2)
    world.coordinator.publish_policy(table_weights(1))
    await until(lambda: (latest := worker.follower.latest()) is not None and latest.version == 1)
    engine.calls[0].set()
    await until(lambda: any(lease.policy_version == 1 for lease in world.coordinator.leases.values()))
    await turns()
    assert engine.loaded == [0]
    engine.release_all()
    await until(lambda: engine.loaded == [0, 1])
    world.stop_when(lambda: len(world.coordinator.verdicts) > 6)
    await working
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())


async def test_one_swap_in_flight_serves_all_leases_in_generation(tmp_path: Path) -> None:
    pinned = make_run(schedule={"in_flight_weight_updates": True})
    world, engine = WorkerWorld(tmp_path, pinned=pinned), SwappingTogether(2 * LEASE)
    working = asyncio.create_task(run_worker(world.worker(engine), world.stop))
    await until(lambda: len(engine.calls) == 2)
    world.coordinator.publish_policy(table_weights(1))
    await until(lambda: engine.updates == [1])
    await turns()
    engine.release_all()
    world.stop_when(lambda: len(world.coordinator.verdicts) >= 3)
    await working
    assert engine.updates == [1]
    assert engine.loaded == [0, 1]
    assert set(list(world.coordinator.leases)[:2]).isdisjoint(world.coordinator.returned)


async def test_a_swap_that_fails_hands_back_every_lease_in_generation(tmp_path: Path) -> None:
    pinned = make_run(schedule={"in_flight_weight_updates": True})
    world, engine = WorkerWorld(tmp_path, pinned=pinned), SwappingTogether(2 * LEASE, fails=True)
    working = asyncio.create_task(run_worker(world.worker(engine), world.stop))
    await until(lambda: len(engine.calls) == 2)
    begun = list(world.coordinator.leases)[:2]
    world.coordinator.publish_policy(table_weights(1))
    await until(lambda: set(begun) <= set(world.coordinator.returned))
    engine.release_all()
    world.stop_when(lambda: world.coordinator.accepted >= 1)
    await working
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())


async def test_at_the_end_of_the_grace_period_every_open_lease_is_handed_back(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), Together(2 * LEASE)
    working = asyncio.create_task(run_worker(world.worker(engine, leases_ahead=1, grace_seconds=100.0), world.stop))
    await until(lambda: len(engine.calls) == 2 and len(world.coordinator.leases) == 3)
    world.stop.set()
    assert await working is Ending.STOPPED
    assert set(world.coordinator.returned) == set(world.coordinator.leases)
    assert world.coordinator.left
    assert names_in(tmp_path / "spool", "*.parcel") == []


async def test_a_swap_waits_for_a_lease_that_needs_one_policy_to_the_end() -> None:
    loaded, engine = LoadedPolicy(0), SwappingTogether(1)
    loaded.enter("evaluation", to_the_end=True)
    loaded.enter("group", to_the_end=False)

    async def swap() -> None:
        await loaded.swap_to(
            1, table_weights(1), engine=engine, swap=SwapPolicy.KEEP_KV, timed=lambda version: nullcontext()
        )

    swapping = [asyncio.create_task(swap()) for _ in range(2)]
    await turns()
    assert engine.updates == []
    loaded.leave("evaluation")
    await asyncio.gather(*swapping)
    assert (engine.updates, loaded.version) == ([1], 1)
    assert not loaded.unused.is_set()


async def test_leases_hear_of_a_swap_that_another_one_began_and_that_failed() -> None:
    loaded, engine = LoadedPolicy(0), SwappingTogether(1, fails=True)
    for _ in range(2):
        with pytest.raises(EngineMismatch):
            await loaded.swap_to(
                1, table_weights(1), engine=engine, swap=SwapPolicy.KEEP_KV, timed=lambda version: nullcontext()
            )
    assert (engine.updates, loaded.version) == ([1], -1)
