"""One identity on two machines: one of them works, the other one gets the reason of its refusal, and no work is lost."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from tests.node.aged_process import Digits
from tests.node.coordinator_process import crash_run, start
from tests.node.coordinator_world import (
    ANNA,
    ENGINE,
    HEARTBEAT,
    Letters,
    World,
    make_parcel,
    memory_parts,
    running,
)
from tests.node.coordinator_world import make_run as make_plain_run
from tests.node.served_world import publish, validate
from tests.node.swarm_world import LOCAL
from tests.node.table_engine import TableEngine, equipped
from tests.node.worker_world import COORDINATOR, MODEL_FILES, WORKER, MemorySource, make_run
from tests.time_world import until

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.cli import wire_swarm
from prime_node.patience import Switch
from prime_node.worker.config import WorkerConfig
from prime_node.worker.loop import run_worker
from prime_node.worker.reporting import status_of
from prime_node.worker.worker import Ending, Worker
from prime_protocol.assignment import Lease
from prime_protocol.envelope import Envelope, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import JoinRequest, LeaseRequest, LeaveRequest, ReceiptsRequest, ReturnLeaseRequest
from prime_protocol.run_spec import PinnedRun

if TYPE_CHECKING:
    from prime_node.adapters.peers.libp2p_network import Libp2pNetwork

HEARTBEAT_S = 0.2
RUN = make_run(lease_seconds=60.0, heartbeat_seconds=HEARTBEAT_S, max_steps=100, groups_per_step=64)
ONE, TWO = "1" * 32, "2" * 32


def machine(run_: PinnedRun, client: HttpClient, folder: Path) -> Worker:
    """Return a worker with the key WORKER and a separate folder, as on another machine."""
    clock, rng = SystemClock(), random.Random(1)
    pool = SourcePool([("http", client)], clock=clock, rng=rng)
    return Worker(
        run=run_,
        config=WorkerConfig.model_validate(
            {"rollouts_max": 8, "receipts_seconds": 0.2, "wait_seconds": 0.5, "grace_seconds": 5.0}
        ),
        key=WORKER,
        coordinator=client,
        engine_info=TableEngine().info,
        equip=equipped(TableEngine()),
        follower=Follower(run_, pool, folder / "c", clock=clock, poll_s=0.05, rng=rng),
        trust=Trust(run_, [("http", client)], folder / "trust", clock=clock, rng=rng),
        folder=folder,
        clock=clock,
        rng=rng,
    )


@contextlib.asynccontextmanager
async def site() -> AsyncIterator[World]:
    """A coordinator with a validator and policy 0."""
    parts = dataclasses.replace(memory_parts(RUN), key=COORDINATOR, environments={"toy": Letters()}, tokenizer=Digits())
    for data in MODEL_FILES.values():
        await parts.public.put(data)
    async with running(parts) as world:
        validating = asyncio.create_task(validate(world.client(COORDINATOR)))
        await publish(world, MemorySource(RUN), 0, None)
        yield world
        validating.cancel()
        await asyncio.gather(validating, return_exceptions=True)


def client_of(world: World) -> HttpClient:
    return HttpClient(world.url, run=world.run.digest, clock=SystemClock(), key=WORKER)


@pytest.mark.timeout(60)
async def test_of_two_real_workers_with_one_key_one_works_and_the_other_continues_when_it_has_left(
    tmp_path: Path,
) -> None:
    (tmp_path / "one").mkdir()
    async with site() as world, client_of(world) as first, client_of(world) as second:
        stop_one, stop_two = asyncio.Event(), asyncio.Event()
        one = machine(RUN, first, tmp_path / "one")
        working = asyncio.create_task(run_worker(one, stop_one))
        await until(lambda: one.receipts.tally().accepted >= 16)
        shutil.copytree(tmp_path / "one", tmp_path / "two")  # a copy of everything, its lock's file too
        two = machine(RUN, second, tmp_path / "two")
        waiting = asyncio.create_task(run_worker(two, stop_two))
        await until(lambda: two.session.in_use)
        line = status_of(two).line()
        assert "waiting: another machine has used this key since 20" in line
        assert "Give each machine its own identity, or stop the other one" in line
        before = one.receipts.tally().accepted
        await until(lambda: one.receipts.tally().accepted >= before + 32)
        assert two.activity.rollouts_generated == 0
        stop_one.set()
        assert await working is Ending.STOPPED
        tally = two.receipts.tally()
        await until(lambda: two.activity.rollouts_generated >= 16)
        await until(lambda: two.receipts.tally().accepted > tally.accepted)
        stop_two.set()
        assert await waiting is Ending.STOPPED
        assert one.receipts.tally().refused == two.receipts.tally().refused == {}
        assert (await world.status())["rollouts"]["refused"] == {}


@contextlib.asynccontextmanager
async def machine_with_host(client: HttpClient, folder: Path) -> AsyncIterator[tuple[Worker, Libp2pNetwork]]:
    """The same, with the libp2p host that a worker of the command line has."""
    settings = WorkerConfig(swarm=LOCAL.model_copy(update={"p2p": "on", "p2p_listen": ("/ip4/127.0.0.1/tcp/0",)}))
    accepted = Switch()
    following = wire_swarm.swarm_follower(RUN, WORKER, client, folder, settings, accepted=accepted)
    async with following as (follower, trust, peer):
        assert peer is not None
        made = machine(RUN, client, folder / "worker")
        made = dataclasses.replace(made, folder=folder / "own", follower=follower, trust=trust, accepted=accepted)
        yield made, cast("Libp2pNetwork", peer.network)


@pytest.mark.timeout(60)
async def test_a_machine_that_the_coordinator_refuses_opens_no_swarm_host(tmp_path: Path) -> None:
    pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")
    async with (
        site() as world,
        client_of(world) as first,
        client_of(world) as second,
        machine_with_host(first, tmp_path / "one") as (one, host_one),
        machine_with_host(second, tmp_path / "two") as (two, host_two),
    ):
        assert not host_one.addresses(), "nothing is open before the coordinator has answered"
        stop_one, stop_two = asyncio.Event(), asyncio.Event()
        working = asyncio.create_task(run_worker(one, stop_one))
        await until(host_one.addresses)
        waiting = asyncio.create_task(run_worker(two, stop_two))
        await until(lambda: two.session.in_use)
        assert await never_opens(host_two, seconds=4 * HEARTBEAT_S)
        stop_one.set()
        assert await working is Ending.STOPPED
        await until(host_two.addresses)
        # The first one returns while the second one is disconnected, and the second one is then refused.
        await client_leaves(second, two)
        await first.join(join(ONE))
        await until(lambda: two.session.in_use)
        await until(lambda: not host_two.addresses())
        await first.leave(LeaveRequest(session=ONE))
        await until(host_two.addresses)
        stop_two.set()
        assert await waiting is Ending.STOPPED


async def never_opens(host: Libp2pNetwork, *, seconds: float) -> bool:
    """Return whether a host stays closed for this long."""
    with contextlib.suppress(TimeoutError):
        await until(host.addresses, seconds=seconds)
    return not host.addresses()


async def client_leaves(client: HttpClient, worker: Worker) -> None:
    """End a session without its worker's knowledge, as four missed heartbeats do."""
    await client.leave(LeaveRequest(session=worker.session.name))


@pytest.mark.timeout(60)
async def test_a_machine_that_crashed_and_starts_at_once_waits_no_longer_than_four_heartbeats(tmp_path: Path) -> None:
    async with site() as world, client_of(world) as client:
        crashed = machine(RUN, client, tmp_path)
        working = asyncio.create_task(run_worker(crashed, asyncio.Event()))
        await until(lambda: crashed.activity.rollouts_generated >= 16)
        working.cancel()  # without a goodbye
        await asyncio.gather(working, return_exceptions=True)
        began_s = crashed.clock.monotonic_s()
        again, stop = machine(RUN, client, tmp_path), asyncio.Event()
        working = asyncio.create_task(run_worker(again, stop))
        await until(lambda: again.session.joined)
        assert again.clock.monotonic_s() - began_s < 4 * HEARTBEAT_S + 2.0  # and what a busy machine takes
        await until(lambda: again.receipts.tally().pending or again.activity.rollouts_generated >= 8)
        stop.set()
        await working


async def test_a_state_folder_copied_with_its_spool_loses_nothing_and_counts_once(tmp_path: Path) -> None:
    plain = make_plain_run(heartbeat_seconds=HEARTBEAT_S)
    async with running(memory_parts(plain), ANNA) as world:
        lease = await world.lease(ANNA)
        parcel = make_parcel(lease, ANNA)
        replies = []
        for session in (ONE, TWO):  # each machine uploads the content of its copy of the spool
            async with HttpClient(world.url, run=plain.digest, clock=SystemClock(), key=ANNA) as client:
                with contextlib.suppress(RemoteError):
                    await client.join(join(session))
                replies.append(await client.upload(parcel))
        assert replies[0] == replies[1]
        assert replies[0].verdict is None
        status = await world.status()
        assert status["pending_bundles"] == 1
        assert status["rollouts"]["refused"] == {}


def join(session: str) -> JoinRequest:
    return JoinRequest(name="anna", software="1", engine=ENGINE, rollouts_max=8, session=session)


async def test_the_second_session_can_neither_take_hand_back_nor_end_anything_of_the_first() -> None:
    async with running(memory_parts(make_plain_run())) as world:
        manifest = await world.publish()
        client = world.client(ANNA)
        await client.join(join(ONE))
        asked = LeaseRequest(policy_version=0, policy_digest=manifest.digest, rollouts_max=2, session=ONE)
        await client.lease(asked)
        for call in (
            lambda: client.join(join(TWO)),
            lambda: client.heartbeat(HEARTBEAT.model_copy(update={"session": TWO})),
            lambda: client.lease(asked.model_copy(update={"session": TWO, "holding": ()})),
            lambda: client.return_lease(ReturnLeaseRequest(lease_id="0" * 64, session=TWO)),
            lambda: client.leave(LeaveRequest(session=TWO)),
        ):
            with pytest.raises(RemoteError, match="another machine has used this key since") as caught:
                await call()
            assert caught.value.code is ErrorCode.IN_USE
            assert caught.value.retry_after_s is not None
        status = await world.status()
        assert (status["num_workers"], status["open_leases"]) == (1, 1)
        await client.heartbeat(HEARTBEAT.model_copy(update={"session": ONE}))
        await client.receipts(ReceiptsRequest())
        await client.join(join(ONE))  # the same process may join again
        await client.leave(LeaveRequest(session=ONE))
        await client.join(join(TWO))


async def test_a_release_without_sessions_takes_part_and_may_join_again() -> None:
    async with running(memory_parts(make_plain_run())) as world:
        for _ in range(2):
            await world.join(ANNA)
            await world.client(ANNA).heartbeat(HEARTBEAT)
        with pytest.raises(RemoteError) as caught:
            await world.client(ANNA).join(join(ONE))
        assert caught.value.code is ErrorCode.IN_USE


async def test_the_session_that_takes_part_outlives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    process, port = await start(tmp_path, 0)
    plain = make_plain_run(**crash_run())
    try:
        async with HttpClient(f"http://127.0.0.1:{port}", run=plain.digest, clock=SystemClock(), key=ANNA) as client:
            await client.join(join(ONE))
            process.kill()
            await process.wait()
            process, _ = await start(tmp_path, port)
            with pytest.raises(RemoteError) as caught:
                await client.join(join(TWO))
            assert caught.value.code is ErrorCode.IN_USE
            await client.heartbeat(HEARTBEAT.model_copy(update={"session": ONE}))
    finally:
        process.kill()
        await process.wait()


async def test_a_bundle_that_others_send_again_keeps_no_session_alive_and_uses_up_no_rate() -> None:
    run_ = make_plain_run(heartbeat_seconds=HEARTBEAT_S)
    async with running(memory_parts(run_, requests_per_second=2.0)) as world:
        await world.publish()
        client = world.client(ANNA)
        await client.join(join(ONE))
        manifest = world.head
        assert manifest is not None
        asked = LeaseRequest(policy_version=0, policy_digest=manifest.digest, rollouts_max=2, session=ONE)
        lease = parse_json(sealed(await client.lease(asked)).payload, Lease)
        parcel = make_parcel(lease, ANNA)
        await client.upload(parcel)  # and then its machine crashes

        async def is_let_in() -> bool:
            status, _ = await world.post("/v1/rollouts", parcel)
            assert status in (200, 403, 429)
            with contextlib.suppress(RemoteError):
                await client.join(join(TWO))
                return True
            return False

        await world.until(is_let_in)


def sealed(answer: object) -> Envelope:
    assert isinstance(answer, Envelope)
    return answer
