"""A coordinator that stood still, or whose store did: its workers have sent what it has not read yet, or wait for its answers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, make_parcel, make_run, memory_parts, running
from tests.node.held_store_world import HeldStore
from tests.time_world import until

from prime_lab.memory_blobs import MemoryDocuments
from prime_node.adapters.system_clock import SystemClock
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import LeaveRequest

HEARTBEAT_S = 30.0


class JumpingClock(SystemClock):
    """Clock that a test moves on, as the time in which a process does not run."""

    ahead_s, num_slept = 0.0, 0

    def monotonic_s(self) -> float:
        return super().monotonic_s() + self.ahead_s

    def now_ms(self) -> int:
        return super().now_ms() + round(1_000 * self.ahead_s)

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds)
        self.num_slept += 1

    async def jump(self, seconds: float) -> None:
        """Move on, and wait until the coordinator has noticed."""
        self.ahead_s += seconds
        slept = self.num_slept
        await until(lambda: self.num_slept > slept + 3)


async def test_a_coordinator_that_stood_still_loses_no_worker_and_no_lease() -> None:
    """Before, all workers were lost and their leases given to others before a waiting heartbeat or upload was read."""
    clock = JumpingClock()
    parts = replace(memory_parts(make_run(heartbeat_seconds=HEARTBEAT_S, lease_seconds=60.0)), clock=clock)
    async with running(parts, ANNA) as world:
        lease = await world.lease(ANNA)
        await clock.jump(1_000.0)
        await world.client(ANNA).heartbeat(HEARTBEAT)
        assert (await world.status())["open_leases"] == 1
        assert (await world.client(ANNA).upload(make_parcel(lease, ANNA))).verdict is None


class HeldDocuments(MemoryDocuments):
    """Documents on the disk of a store that a test can block."""

    def __init__(self, store: HeldStore) -> None:
        super().__init__()
        self._store = store

    async def write(self, name: str, data: bytes) -> None:
        await self._store.may_write.wait()
        await super().write(name, data)


@pytest.mark.parametrize("same_disk", [False, True])
async def test_a_worker_that_waits_for_a_slow_store_is_not_lost(same_disk: bool) -> None:
    """Before, it was: its heartbeat was read and not answered, and so it sent no further one."""
    clock, store = JumpingClock(), HeldStore()
    parts = replace(memory_parts(make_run(heartbeat_seconds=HEARTBEAT_S)), clock=clock, store=store)
    if same_disk:  # the timer itself waits for it
        parts = replace(parts, private=HeldDocuments(store), published=HeldDocuments(store))
    async with running(parts, ANNA, BEN) as world:
        store.may_write.clear()
        store.is_asked.clear()
        leaving = asyncio.create_task(world.client(BEN).leave(LeaveRequest()))
        await store.is_asked.wait()
        beating = asyncio.create_task(world.client(ANNA).heartbeat(HEARTBEAT))
        for _ in range(10):
            await clock.jump(0.9 * HEARTBEAT_S)
        store.may_write.set()
        await asyncio.gather(leaving, beating)
        await world.client(ANNA).heartbeat(HEARTBEAT)


async def test_a_worker_that_is_silent_after_that_is_lost_as_ever() -> None:
    clock = JumpingClock()
    parts = replace(memory_parts(make_run(heartbeat_seconds=HEARTBEAT_S)), clock=clock)
    async with running(parts, ANNA) as world:
        await clock.jump(1_000.0)
        for _ in range(10):
            await clock.jump(0.9 * HEARTBEAT_S)
        with pytest.raises(RemoteError) as unknown:
            await world.client(ANNA).heartbeat(HEARTBEAT)
        assert unknown.value.code is ErrorCode.UNKNOWN_WORKER
