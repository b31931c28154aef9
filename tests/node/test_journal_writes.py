"""The journal writes what several handlers decide together."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.node.coordinator_world import make_run

from prime_lab.memory_store import MemoryStore
from prime_lab.virtual_loop import VirtualLoop, run_virtually
from prime_node.adapters.system_clock import SystemClock
from prime_node.coordinator.journal import WRITE_S_MIN, open_journal
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.rules import rules_of
from prime_node.coordinator.state_follower import restore_state
from prime_node.ports.store import LoggedEvent, StoredReceipt


class CountedStore(MemoryStore):
    """A store that notes the number of events in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    async def append(
        self, events: Sequence[LoggedEvent], receipts: Sequence[StoredReceipt] = (), ledger: Sequence[str] = ()
    ) -> None:
        """Append."""
        self.batches.append(len(events))
        await super().append(events, receipts, ledger)


def test_under_load_handlers_share_a_write_and_one_alone_waits_for_none() -> None:
    """Before, a fast disk left one lease to a write, which costs as much as the lease."""

    async def batches() -> list[int]:
        store, run = CountedStore(), make_run()
        journal = await open_journal(
            store,
            await restore_state(store, rules_of(run)),
            clock=SystemClock(),
            sign_receipt=lambda settled, at_ms: pytest.fail("nothing is settled"),
            snapshot_events=100,
        )
        writer, loop = asyncio.create_task(journal.write(lambda bundles: None)), asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)

        async def decide() -> None:
            journal.record(ev.DrainSet())
            await journal.synced()

        waiting = list[asyncio.Task[None]]()
        for _ in range(10):
            waiting.append(asyncio.create_task(decide()))
            for _ in range(4):  # turns of the loop in no time
                await asyncio.sleep(0)
            loop.jump(WRITE_S_MIN / 5)
        await asyncio.gather(*waiting)
        loop.jump(WRITE_S_MIN)
        begun_s = loop.time()
        await decide()
        assert loop.time() == begun_s
        journal.close()
        await writer
        return store.batches

    found = run_virtually(batches())
    assert sum(found) == 11
    assert found[0] == 1
    assert len(found) <= 5


async def test_a_restart_collects_no_garbage_while_it_folds_events() -> None:
    """Before, a collection looked again and again at all that the events had built."""
    store, was_collecting, seen = MemoryStore(), gc.isenabled(), list[bool]()
    await store.append([LoggedEvent(1, 1, ev.event_to_json(ev.DrainSet()))])

    class Looking(MemoryStore):
        async def events(self, *, after: int) -> AsyncIterator[LoggedEvent]:
            seen.append(gc.isenabled())
            async for event in store.events(after=after):
                yield event

    gc.enable()
    try:
        number, state = await restore_state(Looking(), rules_of(make_run()))
        assert gc.isenabled()
    finally:
        if not was_collecting:
            gc.disable()
    assert (number, state.draining, seen) == (1, True, [False])
