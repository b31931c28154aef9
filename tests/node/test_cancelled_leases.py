"""Leases that can no longer be used: the coordinator names them, and the worker stops and gives them back."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.node.coordinator_world import ANNA, BEN, HEARTBEAT, memory_parts, running
from tests.node.coordinator_world import make_run as make_small_run
from tests.node.memory_coordinator import WorkerWorld
from tests.node.scheduler_world import RULES, Run
from tests.node.together_world import LEASE, SwappingTogether, Together
from tests.node.worker_world import make_run
from tests.time_world import until
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import snapshot
from prime_node.coordinator.state.records import LeaseEnd, State
from prime_node.coordinator.state.rules import SchedulerRules
from prime_node.coordinator.state.scheduler import NothingToLease, cancelled_leases, is_outdated, is_useless
from prime_node.coordinator.state.tick import tick
from prime_node.ports.engine import GenerateRequest
from prime_node.worker.loop import run_worker
from prime_protocol.assignment import Sampling
from prime_protocol.replies import HeartbeatReply
from prime_protocol.requests import ReturnLeaseRequest
from prime_protocol.schedule import Selection, StalenessFrom, StalePolicy

DROPPING = dataclasses.replace(
    RULES,
    groups_per_step=2,
    max_steps=9,
    selection=Selection.READY_FIRST,
    stale=StalePolicy.DROP,
    lag_max=1,
    leases_per_worker_max=8,
)


def overdue(rules: SchedulerRules = DROPPING) -> tuple[Run, str]:
    """Return a run whose trainer is two steps after the policy of anna's lease."""
    run = Run(rules, workers=("anna", "ben"))
    slow = run.granted("anna", 0, 2)
    run.train("ben", 0)
    assert not is_useless(run.state, slow)
    run.train("ben", 1)
    return run, slow.lease_id


def test_a_lease_is_useless_once_its_groups_would_be_dropped() -> None:
    run, lease = overdue()
    assert is_useless(run.state, run.state.leases[lease])
    assert cancelled_leases(run.state, "anna", (lease, "f" * 64)) == (lease, "f" * 64), "nobody knows the other one"
    fresh = run.granted("anna", 2, 2).lease_id
    assert cancelled_leases(run.state, "anna", (lease, fresh)) == (lease,)
    assert cancelled_leases(run.state, "ben", (lease, fresh)) == (), "they are not ben's"
    run.accept(run.upload(run.state.leases[lease]))
    run.fix()
    assert run.state.num_dropped_groups == 1, "whoever finishes it is judged as ever, and it is dropped"


@pytest.mark.parametrize(
    "changes",
    [
        {"stale": StalePolicy.KEEP},
        {"stale": StalePolicy.WAIT, "lag_max": 5},
        {"stale": StalePolicy.MASK},
        {"lag_max": 2},
        {"spans": True, "staleness_from": StalenessFrom.END},
        {"spans": True, "staleness_from": StalenessFrom.OLDEST},
    ],
)
def test_a_lease_that_may_still_be_trained_on_is_not_cancelled(changes: dict[str, Any]) -> None:
    run, lease = overdue(dataclasses.replace(DROPPING, **changes))
    assert not is_useless(run.state, run.state.leases[lease])


@pytest.mark.parametrize("changes", [{"spans": True}, {"staleness_from": StalenessFrom.END}])
def test_text_that_counts_from_the_leased_policy_is_cancelled(changes: dict[str, Any]) -> None:
    run, lease = overdue(dataclasses.replace(DROPPING, **changes))
    assert is_useless(run.state, run.state.leases[lease])


def test_a_useless_lease_that_is_given_back_is_not_abandoned_and_its_slots_are_the_next() -> None:
    run, lease = overdue()
    before, slots = snapshot.state_to_json(run.state), run.state.leases[lease].slots
    run.do(ev.LeaseReturned(lease, cancelled=True))
    anna = run.state.workers["anna"]
    assert (anna.wasted, anna.abandoned, anna.ended[-1].end) == (0, 0, LeaseEnd.CANCELLED)
    assert run.granted("ben", 2, 2).slots == slots
    restored: State = snapshot.state_from_json(before)
    for event, at_ms in run.log[-2:]:
        tick(restored, ev.event_from_json(ev.event_to_json(event)), at_ms)
    assert restored == run.state, "a restart folds the same state from the log"


def test_work_that_would_be_dropped_is_not_begun_on_an_old_policy() -> None:
    run, _ = overdue()
    assert is_outdated(run.state, 0)
    assert isinstance(refusal := run.lease("ben", 0), NothingToLease)
    assert "policy 2 is the newest" in refusal.reason
    run.granted("ben", 1)


def test_a_lease_that_others_took_over_is_named_and_one_that_may_be_redeemed_is_not() -> None:
    run = Run(dataclasses.replace(DROPPING, lag_max=8, leases_per_slot_max=2), workers=("anna", "ben"))
    lapsed = run.granted("anna", 0, 2).lease_id
    run.do(ev.LeasesExpired((lapsed,)))
    assert cancelled_leases(run.state, "anna", (lapsed,)) == (), "nobody has its slots yet"
    taken = run.granted("ben", 0, 2)
    assert cancelled_leases(run.state, "anna", (lapsed,)) == (lapsed,)
    run.upload(taken)
    assert cancelled_leases(run.state, "ben", (taken.lease_id,)) == (), "its bundle waits for a verdict"


async def test_only_a_worker_that_names_its_leases_hears_of_cancelled_ones() -> None:
    schedule = {"preset": "nemo_windowed", "max_off_policy_steps": 0, "staleness_threshold": 2.0}
    small = make_small_run(schedule=schedule, async_level=2, groups_per_step=1)
    async with running(memory_parts(small), ANNA, BEN) as world:
        slow = await world.lease(ANNA, rollouts_max=4)
        asked = HEARTBEAT.model_copy(update={"holding": (slow.lease_id,)})
        assert (await world.client(ANNA).heartbeat(asked)).cancelled == ()
        await world.fill(0, BEN)
        await world.publish()
        assert (await world.client(ANNA).heartbeat(asked)).cancelled == (slow.lease_id,)
        assert (await world.client(ANNA).heartbeat(HEARTBEAT)).cancelled == ()
        await world.client(ANNA).return_lease(ReturnLeaseRequest(lease_id=slow.lease_id))
        assert (await world.client(ANNA).heartbeat(asked)).cancelled == (slow.lease_id,)
        assert b'prime_leases_wasted_total{outcome="cancelled"} 1.0' in (await world.get("/metrics"))[1]


def test_an_answer_without_cancelled_leases_is_what_older_workers_know() -> None:
    assert "cancelled" not in HeartbeatReply(step=0, head=0).model_dump_json()


async def test_a_worker_stops_a_cancelled_lease_at_once_and_goes_on_with_the_others(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path, pinned=make_run(heartbeat_seconds=50.0)), Together(2 * LEASE)
    working = asyncio.create_task(run_worker(world.worker(engine), world.stop))
    await until(lambda: len(engine.calls) == 2)
    first, second = list(world.coordinator.leases)[:2]
    world.coordinator.cancels.add(first)
    await until(lambda: world.coordinator.returned == [first] and len(engine.calls) == 3)
    assert not engine.calls[0].is_set(), "its requests were stopped, not finished"
    named = [beat.holding for beat in world.coordinator.beats if beat.holding]
    assert any({first, second} <= set(holding) for holding in named), (
        "the first heartbeat may be older than the second lease"
    )
    engine.release_all()
    world.stop.set()
    await working
    assert world.coordinator.accepted == len(world.coordinator.verdicts) == len(engine.calls) - 1


async def test_a_queued_lease_that_is_cancelled_is_never_begun(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path, pinned=make_run(heartbeat_seconds=50.0)), Together(LEASE)
    working = asyncio.create_task(run_worker(world.worker(engine, leases_ahead=1), world.stop))
    await until(lambda: len(world.coordinator.leases) == 2 and engine.calls)
    first, queued = world.coordinator.leases
    world.coordinator.cancels |= {first, queued}
    await until(lambda: set(world.coordinator.returned) == {first, queued} and len(engine.calls) == 2)
    engine.release_all()
    world.stop.set()
    await working
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())


class SlowSwap(SwappingTogether):
    """Engine whose update takes until it is released."""

    def __init__(self) -> None:
        super().__init__(2 * LEASE)
        self.swapping, self.go = asyncio.Event(), asyncio.Event()

    async def update(self, *arguments: object, **settings: object) -> None:
        self.swapping.set()
        await self.go.wait()
        await super().update(*arguments, **settings)  # type: ignore[arg-type]


async def test_a_cancelled_lease_does_not_interrupt_a_swap_that_others_need(tmp_path: Path) -> None:
    pinned = make_run(heartbeat_seconds=50.0, schedule={"in_flight_weight_updates": True})
    world, engine = WorkerWorld(tmp_path, pinned=pinned), SlowSwap()
    worker = world.worker(engine)
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: len(engine.calls) == 2)
    world.coordinator.publish_policy(world.coordinator.policies[0])
    await engine.swapping.wait()
    first, second = list(world.coordinator.leases)[:2]
    world.coordinator.cancels |= {first, second}
    await until(lambda: all(worker.activity.in_hand[lease].cancelled.is_set() for lease in (first, second)))
    assert world.coordinator.returned == []
    engine.go.set()
    await until(lambda: {first, second} <= set(world.coordinator.returned))
    assert (worker.loaded.version, engine.updates) == (1, [1])
    engine.release_all()
    world.stop.set()
    await working


async def test_a_real_engine_stops_at_the_next_token_and_is_usable_at_once(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=48)
    sampling = Sampling(completion_tokens_max=2_000, stop_token_ids=())
    pinned = make_run(heartbeat_seconds=50.0, sampling=sampling)
    world, engine = WorkerWorld(tmp_path / "worker", pinned=pinned, policies=0), TransformersEngine(model)
    world.coordinator.publish_policy(initial_weights(model, 0))
    world.coordinator.leases_max = 1
    worker = world.worker(engine)
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: bool(worker.loaded.version == 0 and not worker.loaded.unused.is_set()))
    (lease,) = world.coordinator.leases
    world.coordinator.cancels.add(lease)
    await until(lambda: world.coordinator.returned == [lease])
    assert worker.activity.rollouts_generated == 0
    short = await engine.generate(
        [GenerateRequest((1, 2), seed=3)], Sampling(completion_tokens_max=4, stop_token_ids=())
    )
    assert len(short[0].token_ids) == 4
    world.stop.set()
    await working
    assert world.coordinator.verdicts == {}
    await engine.close()
