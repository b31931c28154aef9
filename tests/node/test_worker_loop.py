"""The worker's loop against an honest coordinator in memory: real leases, signatures, sampling and checks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.node.memory_coordinator import MemoryCoordinator, WorkerWorld
from tests.node.table_engine import TableEngine, table_weights
from tests.node.worker_world import COORDINATOR, ROOT, WORKER, make_run, names_in, next_ring
from tests.time_world import VirtualClock, until

from prime_node.broadcast.follow.pinned import fetch_run
from prime_node.patience import SAY_AGAIN_S
from prime_node.ports.engine import GenerateRequest
from prime_node.worker.generating import open_lease
from prime_node.worker.loop import run_worker
from prime_node.worker.pace import GenerationPace
from prime_node.worker.receipts import ReceiptBook
from prime_node.worker.worker import Ending
from prime_protocol.assignment import HELD_OUT_START, Sampling
from prime_protocol.envelope import PayloadType, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyChain
from prime_protocol.requests import LeaseRequest, WorkerState
from prime_protocol.rollout import Completion
from prime_protocol.schedule import SwapPolicy
from prime_protocol.verdict import Receipt
from prime_protocol.weights import Weights

RUN = make_run()


async def test_an_honest_worker_is_accepted_and_leaves_in_order(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    world.stop_when(lambda: world.coordinator.accepted >= 5)
    assert await run_worker(world.worker(), world.stop) is Ending.STOPPED
    assert world.coordinator.accepted == len(world.coordinator.verdicts) >= 5
    assert world.coordinator.left
    assert names_in(tmp_path / "spool", "*.parcel") == []
    open_leases = world.coordinator.leases.keys() - set(world.coordinator.returned)
    assert len(open_leases) - len(world.coordinator.verdicts) <= 1, "at most the one that was on its way"


class PaceOfShortLeases(GenerationPace):
    """Pace of a worker far from its coordinator."""

    fetches_ahead = True


@pytest.mark.parametrize(
    ("setting", "are_short", "leases_ahead"),
    [(0, True, 0), (1, False, 1), (3, True, 3), (None, True, 1), (None, False, 0)],
)
async def test_the_next_leases_are_asked_for_while_the_current_one_generates(
    tmp_path: Path, setting: int | None, are_short: bool, leases_ahead: int
) -> None:
    world = WorkerWorld(tmp_path)
    ahead: list[int] = []

    class Watching(TableEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            if not world.coordinator.leases:  # the rehearsal
                return await super().generate(requests, sampling)
            await until(lambda: world.stop.is_set() or len(world.coordinator.leases) - len(ahead) > leases_ahead)
            for _ in range(10):
                await asyncio.sleep(0)
            if not world.stop.is_set():
                ahead.append(len(world.coordinator.leases) - len(ahead) - 1)
            return await super().generate(requests, sampling)

    world.stop_when(lambda: world.coordinator.accepted >= 4)
    worker = world.worker(Watching(), leases_ahead=setting)
    if are_short:
        worker.activity.pace = PaceOfShortLeases()
    await run_worker(worker, world.stop)
    assert set(ahead) == {leases_ahead}


class SlowToStart(TableEngine):
    """Engine whose first load lasts until it is released, as vLLM's lasts for tens of seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.loading, self.go = asyncio.Event(), asyncio.Event()

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        self.loading.set()
        await self.go.wait()
        await super().load(weights, policy_version=policy_version)


async def test_no_work_is_taken_before_the_engine_holds_a_policy(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), SlowToStart()
    world.stop_when(lambda: world.coordinator.accepted >= 1)
    working = asyncio.create_task(run_worker(world.worker(engine), world.stop))
    await engine.loading.wait()
    num_messages = len(world.said)
    await until(lambda: len(world.said) > num_messages + 1)
    assert world.coordinator.leases == {}
    assert "waiting: the engine loads policy 0" in world.said[-1]
    world.coordinator.publish_policy(table_weights(1))
    engine.go.set()
    await working
    assert world.coordinator.accepted >= 1


async def test_an_engine_that_still_starts_does_not_delay_a_stop(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), SlowToStart()
    working = asyncio.create_task(run_worker(world.worker(engine), world.stop))
    await engine.loading.wait()
    world.stop.set()
    assert await working is Ending.STOPPED
    assert world.coordinator.leases == {}


async def test_new_policies_are_loaded_as_leases_name_them(tmp_path: Path) -> None:
    world, engine = WorkerWorld(tmp_path), TableEngine()

    def publish_or_stop() -> None:
        version = max(world.coordinator.manifests)
        if version < 3:
            world.coordinator.publish_policy(table_weights(version + 1))
        elif engine.loaded[-1] == 3:
            world.stop.set()

    world.coordinator.after_upload = publish_or_stop
    await run_worker(world.worker(engine), world.stop)
    assert engine.loaded == sorted(set(engine.loaded))
    assert engine.loaded[-1] == 3
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())


async def test_heartbeats_report_when_a_policy_was_usable_and_the_time_of_the_swap(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path, pinned=make_run(heartbeat_seconds=1.0))

    class Slow(TableEngine):
        async def load(self, weights: Weights, *, policy_version: int) -> None:
            await world.clock.sleep(30.0)
            await super().load(weights, policy_version=policy_version)

    world.coordinator.leases_max = 1  # the clock moves only while no thread works, and each lease needs threads
    worker = world.worker(Slow())
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: world.coordinator.accepted == 1 and world.coordinator.beats[-1].policy_version == 0)
    world.coordinator.publish_policy(table_weights(1))
    await until(lambda: worker.follower.versions() == (0, 1))
    world.coordinator.leases_max = 2
    await until(lambda: world.coordinator.beats[-1].policy_version == 1)
    world.stop.set()
    await working
    assert {beat.swap_ms for beat in world.coordinator.beats if beat.policy_version == 0} == {None}, (
        "nothing to compare"
    )
    last_beat = world.coordinator.beats[-1]
    assert last_beat.swap_ms is not None
    assert last_beat.usable_after_ms is not None
    assert 30_000 <= last_beat.swap_ms <= last_beat.usable_after_ms


class SwapsUnderWay(TableEngine):
    """Engine that ends its completions when it gets the next policy."""

    swaps = frozenset({SwapPolicy.KEEP_KV})

    def __init__(self) -> None:
        super().__init__()
        self.at_work, self.swapped = asyncio.Event(), asyncio.Event()

    async def update(self, weights: Weights, *, policy_version: int, swap: SwapPolicy) -> None:
        await super().load(weights, policy_version=policy_version)
        self.swapped.set()

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        self.at_work.set()
        await self.swapped.wait()
        return await super().generate(requests, sampling)


async def test_a_swap_under_way_is_reported_before_the_lease_is_done(tmp_path: Path) -> None:
    pinned = make_run(heartbeat_seconds=1.0, schedule={"in_flight_weight_updates": True})
    world, engine = WorkerWorld(tmp_path, pinned=pinned), SwapsUnderWay()
    worker = world.worker(engine)
    working = asyncio.create_task(run_worker(worker, world.stop))
    await engine.at_work.wait()
    world.coordinator.publish_policy(table_weights(1))
    await engine.swapped.wait()
    await until(lambda: worker.loaded.version == 1)
    assert worker.loaded.swap_ms is not None
    assert worker.loaded.usable_after_ms is not None
    world.stop.set()
    await working


async def test_answers_for_an_evaluation_are_of_one_policy(tmp_path: Path) -> None:
    pinned = make_run(schedule={"in_flight_weight_updates": True})
    world, engine = WorkerWorld(tmp_path, pinned=pinned), SwapsUnderWay()
    world.coordinator.first_problem = HELD_OUT_START
    worker = world.worker(engine)
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: worker.activity.state is WorkerState.GENERATING)
    world.coordinator.publish_policy(table_weights(1))
    await until(lambda: (latest := worker.follower.latest()) is not None and latest.version == 1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not engine.swapped.is_set()
    engine.swapped.set()
    world.stop_when(lambda: world.coordinator.accepted >= 1)
    await working
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())


async def test_leases_that_expired_while_the_machine_slept_are_dropped(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    slept = False

    class Sleepy(TableEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            nonlocal slept
            completions = await super().generate(requests, sampling)
            if world.coordinator.leases and not slept:
                slept = True
                world.clock.seconds += 2 * RUN.spec.lease_seconds
                world.coordinator.known = False
            return completions

    world.stop_when(lambda: world.coordinator.accepted >= 2)
    worker = world.worker(Sleepy())
    assert await run_worker(worker, world.stop) is Ending.STOPPED
    assert worker.activity.leases_dropped >= 1
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())
    assert world.coordinator.joined >= 2


async def test_receipts_are_kept_and_counted_across_restarts(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    world.coordinator.leases_max = 3  # the clock moves only while no thread works, and each lease needs threads
    worker = world.worker()
    task = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: worker.receipts.tally().accepted >= 3 * 8)
    world.stop.set()
    await task
    assert names_in(tmp_path, "contradiction-*") == [], "an honest receipt agrees with its lease"
    tally = worker.receipts.tally()
    assert tally.refused == {}
    lines = (tmp_path / "receipts.jsonl").read_bytes().splitlines()
    for line in lines:
        parse_json(open_envelope(line).verify(PayloadType.RECEIPT, trusted=[COORDINATOR.key_id]), Receipt)
    (tmp_path / "receipts.jsonl").write_bytes(b"\n".join([*lines, b'{"half a li']))
    again = world.worker()
    assert again.receipts.tally() == tally
    assert again.receipts.cursor == worker.receipts.cursor


async def test_a_clock_that_differs_is_reported_and_leases_still_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = WorkerWorld(tmp_path)
    world.coordinator.clock_ahead_s = 3 * RUN.spec.lease_seconds
    world.stop_when(lambda: world.coordinator.accepted >= 1)
    worker = world.worker()
    await run_worker(worker, world.stop)
    assert "s behind the coordinator's" in caplog.text
    assert worker.activity.leases_dropped <= 1


async def test_a_worker_that_is_shown_a_frozen_run_takes_no_new_work_until_it_knows_what_is_newest(
    tmp_path: Path,
) -> None:
    world = WorkerWorld(tmp_path)
    coordinator = world.coordinator
    worker = world.worker()
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: coordinator.accepted >= 2)
    coordinator.shown_timestamp = await coordinator.timestamp()
    coordinator.leases_max = 0  # time moves only while the worker is idle
    await until(lambda: "has expired" in worker.trust.fault())
    await until(lambda: worker.spool.num_bundles == 0 and not worker.activity.in_hand)
    coordinator.leases_max = 10**9
    asked = len(coordinator.leases)
    await until(lambda: "has expired" in worker.activity.waiting_for)
    await world.clock.sleep(30.0)
    assert len(coordinator.leases) == asked
    coordinator.shown_timestamp = None
    await until(lambda: len(coordinator.leases) > asked)
    world.stop.set()
    assert await working is Ending.STOPPED


async def test_a_new_coordinator_key_is_looked_up_and_its_leases_and_receipts_believed(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path, pinned=make_run())
    coordinator = world.coordinator
    coordinator.leases_max = 2  # time moves, and with it the receipts, only while the worker is idle
    new = SigningKey(b"\x51" * 32)
    worker = world.worker()
    working = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: worker.receipts.tally().accepted == 16)
    chain = KeyChain(coordinator.run.digest, coordinator.run.spec.keys)
    coordinator.key_rings.append(next_ring(chain, ROOT, coordinator=(new,)))
    coordinator.key = new
    coordinator.leases_max = 7
    await until(lambda: worker.receipts.tally().accepted == 56)
    world.stop.set()
    assert await working is Ending.STOPPED
    again = ReceiptBook(tmp_path, run=worker.run, worker=WORKER.key_id)
    assert again.tally() == worker.receipts.tally(), "those by the former key are kept"
    asked = LeaseRequest(policy_version=0, policy_digest="00" * 32, rollouts_max=8)
    with pytest.raises(RemoteError) as refused:
        open_lease(seal(b"{}", PayloadType.LEASE, COORDINATOR), asked, run=worker.run, worker=WORKER.key_id)
    assert refused.value.code is ErrorCode.REVOKED


async def test_the_status_shows_what_it_waits_for(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    world.coordinator.leases_max = 0
    worker = world.worker(status_seconds=0.1)
    task = asyncio.create_task(run_worker(worker, world.stop))
    await until(lambda: any("waiting: no work left" in line for line in world.said))
    assert world.status()["waiting_for"] == "no work left"
    world.stop.set()
    await task


async def test_a_clock_that_is_set_after_the_worker_joined_costs_no_later_lease(tmp_path: Path) -> None:
    """Before, a machine that had joined with a clock two minutes behind took each short lease for one that is over."""
    world = WorkerWorld(tmp_path)
    world.coordinator.clock_ahead_s = 2 * RUN.spec.lease_seconds
    task = asyncio.create_task(run_worker(world.worker(), world.stop))
    await until(lambda: world.coordinator.accepted >= 1)
    world.coordinator.clock_ahead_s, accepted = 0.0, world.coordinator.accepted
    await until(lambda: world.coordinator.accepted > accepted + 3)
    world.stop.set()
    await task


async def test_a_coordinator_that_is_away_for_hours_is_named_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, each task of a worker logged each of its attempts, ten lines a minute for as long as a line was cut."""
    world = WorkerWorld(tmp_path)
    task = asyncio.create_task(run_worker(world.worker(), world.stop))
    await until(lambda: world.coordinator.accepted >= 1)
    caplog.clear()
    world.coordinator.away, began_s = True, world.clock.seconds
    await until(lambda: world.clock.seconds > began_s + 3_600.0)
    said = [record for record in caplog.records if record.name == "prime_node.worker.session"]
    passed_s = world.clock.seconds - began_s
    assert 1 <= len(said) <= passed_s / SAY_AGAIN_S + 1
    world.coordinator.away, accepted = False, world.coordinator.accepted
    await until(lambda: world.coordinator.accepted > accepted)
    world.stop.set()
    await task


async def test_a_wrong_run_behind_the_join_link_is_refused() -> None:
    coordinator = MemoryCoordinator(make_run(name="other"), VirtualClock())
    with pytest.raises(RemoteError) as caught:
        await fetch_run(RUN.digest, coordinator, clock=VirtualClock())
    assert caught.value.code is ErrorCode.WRONG_RUN


async def test_the_run_is_waited_for_while_the_coordinator_starts() -> None:
    coordinator = MemoryCoordinator(RUN, VirtualClock())
    coordinator.away = True
    task = asyncio.create_task(fetch_run(RUN.digest, coordinator, clock=VirtualClock()))
    await until(lambda: coordinator.num_asked > 3)
    assert not task.done()
    coordinator.away = False
    assert (await task).digest == RUN.digest


async def test_a_slow_machine_says_so_before_its_first_lease_which_then_fits(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)

    class Slow(TableEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            completions = await super().generate(requests, sampling)
            world.clock.seconds += 10_000.0 * sum(len(one.token_ids) for one in completions)
            return completions

    world.stop_when(lambda: world.coordinator.accepted >= 1)
    await run_worker(world.worker(Slow(), leases_ahead=0), world.stop)
    first = world.coordinator.speeds[0]
    assert first is not None
    assert (first.rollout_ms, first.tokens_per_s) == (8 * 10_000_000, 0)
    leases = list(world.coordinator.leases.values())
    assert leases[0].num_rollouts == 4, "one group: two would take longer than 0.4 of the lease"
