"""The end of a worker: stopped, drained, killed or banned; and coordinators that disappear or lose the worker."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from tests.node.memory_coordinator import WorkerWorld
from tests.node.table_engine import TableEngine
from tests.node.worker_world import names_in
from tests.time_world import until

from prime_node.patience import Stop
from prime_node.ports.engine import GenerateRequest
from prime_node.worker.loop import run_worker
from prime_node.worker.reporting import heartbeat_request, status_of
from prime_node.worker.status import Traffic
from prime_node.worker.worker import Ending
from prime_protocol import limits
from prime_protocol.assignment import Sampling
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import HeartbeatRequest
from prime_protocol.rollout import Completion
from prime_protocol.telemetry import DownloadReport


async def test_a_coordinator_that_forgets_us_is_joined_again(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)

    def forget() -> None:
        if world.coordinator.accepted == 2:
            world.coordinator.known = False
        if world.coordinator.accepted >= 6:
            world.stop.set()

    world.coordinator.after_upload = forget
    assert await run_worker(world.worker(), world.stop) is Ending.STOPPED
    assert world.coordinator.joined >= 2


async def test_a_coordinator_that_goes_away_for_hours_loses_no_work(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    began = world.clock.monotonic_s()

    def go_away() -> None:
        if world.coordinator.accepted == 2:
            world.coordinator.away = True
        if world.coordinator.accepted >= 5:
            world.stop.set()

    async def come_back() -> None:
        await until(lambda: world.coordinator.away)
        await until(lambda: world.clock.monotonic_s() - began > 4 * 3_600)
        assert any("coordinator unreachable" in line for line in world.said)
        world.coordinator.away = False

    world.coordinator.after_upload = go_away
    _, ending = await asyncio.gather(come_back(), run_worker(world.worker(status_seconds=60.0), world.stop))
    assert ending is Ending.STOPPED
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())
    assert len(world.coordinator.verdicts) >= 5


async def test_a_killed_worker_uploads_what_it_had_finished_when_it_starts_again(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    first = world.worker()
    world.coordinator.after_upload = lambda: setattr(world.coordinator, "away", True)
    task = asyncio.create_task(run_worker(first, world.stop))
    await until(lambda: names_in(tmp_path / "spool", "*2-*.parcel"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    left = len(names_in(tmp_path / "spool", "*.parcel"))
    assert left >= 1
    world.coordinator.away = False
    world.coordinator.leases_max = 0
    before = len(world.coordinator.verdicts)
    world.stop_when(lambda: len(names_in(tmp_path / "spool", "*.parcel")) <= 1)
    await run_worker(world.worker(), world.stop)
    assert len(world.coordinator.verdicts) >= before + left - 1
    assert all(verdict.accepted for verdict in world.coordinator.verdicts.values())


async def test_a_banned_worker_says_why_and_ends_with_its_own_code(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)

    def ban() -> None:
        world.coordinator.ban_reason = "two bundles with false logprobs"

    world.coordinator.after_upload = ban
    ending = await run_worker(world.worker(), world.stop)
    assert ending is Ending.BANNED
    assert ending.exit_code == 4
    assert world.status()["ended"] == "banned"
    assert world.status()["notice"] == "two bundles with false logprobs"
    kept = (tmp_path / "receipts.jsonl").read_bytes().splitlines()
    assert len(kept) == len(world.coordinator.receipts_signed) > 0, "it has read what became of its last bundles"


async def test_a_worker_that_is_banned_from_the_start_ends_at_once(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    world.coordinator.ban_reason = "no"
    assert await run_worker(world.worker(), world.stop) is Ending.BANNED


async def test_a_worker_that_is_newer_than_its_coordinator_says_so(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)

    async def refuse(request: HeartbeatRequest) -> NoReturn:
        raise RemoteError(ErrorCode.UNKNOWN_FIELD, "request.heartbeat.swap_ms")

    world.coordinator.heartbeat = refuse  # type: ignore[method-assign]
    with pytest.raises(
        RemoteError, match=r"older release .*swap_ms.*: install that release, or wait until its operator"
    ):
        await run_worker(world.worker(), world.stop)


async def test_a_worker_that_is_forgotten_and_then_banned_ends(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)

    def forget_and_ban() -> None:
        world.coordinator.known = False
        world.coordinator.ban_at_join = "caught while you were away"

    world.coordinator.after_upload = forget_and_ban
    assert await run_worker(world.worker(), world.stop) is Ending.BANNED
    assert world.status()["notice"] == "caught while you were away"


async def test_the_end_of_the_run_drains_the_worker(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    world.coordinator.after_upload = lambda: setattr(world.coordinator, "draining", True)
    ending = await run_worker(world.worker(), world.stop)
    assert ending is Ending.DRAINED
    assert ending.exit_code == 0
    assert world.coordinator.left
    assert not world.stop.is_set()
    farewell = world.said[-1]
    assert farewell.startswith("the run is over, or its operator drains it. Of this key: ")
    accepted = world.status()["rollouts_accepted"]
    assert f"{accepted:,} rollouts accepted, worth {world.status()['tokens_accepted']:,} tokens" in farewell
    assert accepted != 0


async def test_a_worker_that_has_ended_shows_no_notice_of_a_missing_lease(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)

    def end() -> None:
        world.coordinator.draining, world.coordinator.notice = True, "the run has all its rollouts"

    world.coordinator.after_upload = end
    assert await run_worker(world.worker(), world.stop) is Ending.DRAINED
    assert (world.status()["ended"], world.status()["notice"]) == ("drained", "")


async def test_a_worker_that_waits_for_the_first_policy_says_so(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path, policies=0)
    task = asyncio.create_task(run_worker(world.worker(status_seconds=0.1), world.stop))
    await until(
        lambda: "waiting: the trainer has not published a policy yet" in world.said[-1] if world.said else False
    )
    world.stop.set()
    assert await task is Ending.STOPPED
    shown = [line for line in world.said[:-1] if not line.startswith("joined")]
    assert all(line.startswith("no policy yet | ") for line in shown), shown


async def test_stopping_while_a_lease_generates_hands_it_back_after_the_grace_period(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)

    class Endless(TableEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            if not world.coordinator.leases:  # the rehearsal
                return await super().generate(requests, sampling)
            world.stop.set()
            return await asyncio.get_running_loop().create_future()

    assert await run_worker(world.worker(Endless(), leases_ahead=0, grace_seconds=1.0), world.stop) is Ending.STOPPED
    assert world.coordinator.returned == list(world.coordinator.leases)
    assert world.coordinator.verdicts == {}


async def test_ctrl_c_while_a_lease_generates_hands_it_back_before_the_grace_period_ends(tmp_path: Path) -> None:
    """The virtual clock advances in steps of 100 s."""
    world, stop = WorkerWorld(tmp_path), Stop()
    stopped_s = 0.0

    class Endless(TableEngine):
        async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
            nonlocal stopped_s
            if not world.coordinator.leases:  # the rehearsal
                return await super().generate(requests, sampling)
            stop.hurry, stopped_s = True, world.clock.monotonic_s()
            stop.set()
            return await asyncio.get_running_loop().create_future()

    assert await run_worker(world.worker(Endless(), leases_ahead=0, grace_seconds=1e5), stop) is Ending.STOPPED
    assert world.coordinator.returned == list(world.coordinator.leases)
    assert world.clock.monotonic_s() - stopped_s < 1_000.0


async def test_stopping_before_the_coordinator_has_answered_ends_at_once(tmp_path: Path) -> None:
    world = WorkerWorld(tmp_path)
    world.coordinator.away = True
    task = asyncio.create_task(run_worker(world.worker(), world.stop))
    await until(lambda: world.coordinator.num_asked > 0)
    world.stop.set()
    assert await task is Ending.STOPPED
    assert world.coordinator.joined == 0


def test_a_worker_that_has_received_petabytes_reports_the_most_that_it_may(tmp_path: Path) -> None:
    """Before, the number that no coordinator takes ended the worker."""
    worker = WorkerWorld(tmp_path).worker()
    worker.links = lambda: Traffic(down_bytes=2**53, peer_bytes=2**52, all_bytes=2**51)
    most = limits.CLAIMED_BYTES_MAX
    expected = DownloadReport(peer_bytes=most, operator_bytes=most, links=0, all_bytes=most)
    assert heartbeat_request(worker).downloads == expected


def test_a_log_gets_a_line_when_the_situation_changes_and_each_minute(tmp_path: Path) -> None:
    """Before, a service's journal got a line every five seconds."""
    world = WorkerWorld(tmp_path)
    worker, lines = world.worker(), list[int]()
    idle, waiting = status_of(worker), dataclasses.replace(status_of(worker), waiting_for="no work left")
    for status in (*[idle] * 20, *[waiting] * 2, dataclasses.replace(waiting, head=7)):
        world.clock.seconds += 5.0
        worker.show(status)
        lines.append(len(world.said))
    assert lines == [*[1] * 12, *[2] * 8, 3, 3, 3]
