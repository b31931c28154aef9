"""Snapshots come from a copy of the state, and equal the state."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from tests.node.coordinator_world import ANNA, BEN, World, make_parcel, make_run, memory_parts, running
from tests.time_world import until

from prime_lab.memory_store import MemoryStore
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state.snapshot import state_to_json
from prime_node.coordinator.state.tick import tick
from prime_node.coordinator.state_copy import PIECE_ITEMS, StateCopy, json_pieces
from prime_node.ports.store import LoggedEvent, Segment
from prime_protocol.errors import LocalError


class KeepingStore(MemoryStore):
    """Store that keeps all events and snapshots. It can hold a snapshot back, or refuse it."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[LoggedEvent] = []
        self.snapshots: list[tuple[int, str]] = []
        self.may_save = asyncio.Event()
        self.may_save.set()
        self.is_broken = False

    async def append(self, events, receipts=(), ledger=()):  # type: ignore[no-untyped-def]
        await super().append(events, receipts, ledger)
        self.all += events

    async def save_snapshot(
        self, number: int, payload: str, segment: Segment | None = None, *, kept_from: int = 0
    ) -> None:
        self.snapshots.append((number, payload))
        await self.may_save.wait()
        if self.is_broken:
            raise LocalError("the disk is full")
        await super().save_snapshot(number, payload, segment, kept_from=kept_from)


async def work(world: World) -> None:
    """Settle two bundles, and leave a lease."""
    for key in (ANNA, BEN):
        await world.client(key).upload(make_parcel(await world.lease(key, rollouts_max=2), key))
        await world.judge()
    await world.lease(BEN, rollouts_max=2)


def folded(store: KeepingStore, number: int) -> str:
    """Return the state after an event, from the first event on."""
    state = State(rules_of(make_run()))
    for logged in store.all[:number]:
        tick(state, ev.event_from_json(logged.payload), logged.at_ms)
    return state_to_json(state)


async def test_each_snapshot_is_the_state_after_its_event() -> None:
    store = KeepingStore()
    async with running(
        dataclasses.replace(memory_parts(make_run(), snapshot_events=2), store=store), ANNA, BEN
    ) as world:
        await until(lambda: store.snapshots)
        await work(world)
        await until(lambda: len(store.snapshots) > 1)
    assert store.snapshots[-1][0] == len(store.all), "the last one comes at the end"
    for number, payload in store.snapshots:
        assert payload == folded(store, number)


async def test_no_answer_waits_for_a_snapshot() -> None:
    store = KeepingStore()
    async with running(dataclasses.replace(memory_parts(make_run(), snapshot_events=1), store=store)) as world:
        store.may_save.clear()
        await world.publish()
        await world.join(ANNA, BEN)
        await until(lambda: store.snapshots)
        await work(world)  # each request is answered
        assert len(store.snapshots) == 1, "one at a time"
        store.may_save.set()
        await until(lambda: len(store.snapshots) > 1)
    assert store.snapshots[-1][0] == len(store.all)


async def test_a_snapshot_that_fails_ends_the_coordinator() -> None:
    store = KeepingStore()

    async def serve() -> None:
        async with running(dataclasses.replace(memory_parts(make_run(), snapshot_events=1), store=store)) as world:
            store.is_broken = True
            await world.publish()

    with pytest.raises(ExceptionGroup) as failed:
        await serve()
    assert failed.group_contains(LocalError, match="the disk is full")


def test_the_pieces_of_a_large_state_are_its_json() -> None:
    state, size = State(rules_of(make_run())), 3 * PIECE_ITEMS + 1
    events = []
    for number in range(1, size + 1):
        joined = ev.WorkerJoined(worker=f"worker {number}", name='ä "n"', software="1", engine="toy", rollouts_max=1)
        events.append(LoggedEvent(number, number, ev.event_to_json(joined)))
    copy = StateCopy(state, 0)
    payload = copy.snapshot_after(events)
    for logged in events:
        tick(state, ev.event_from_json(logged.payload), logged.at_ms)
    assert len(state.workers) == size
    assert payload == state_to_json(state) == b"".join(json_pieces(state)).decode()
    assert max(map(len, json_pieces(state))) < len(payload) / 2
