"""`prime-node operate`: the operator's hand on a running coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    COORDINATOR,
    ENGINE,
    HEARTBEAT,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.operator_world import operate, run_dir_of
from typer.testing import CliRunner

from prime_node.cli.main import app
from prime_node.coordinator.api import status
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.invite import open_invite
from prime_protocol.replies import NotYet
from prime_protocol.requests import JoinRequest, LeaseRequest
from prime_protocol.run_spec import JoinLink


async def test_a_worker_is_banned_and_forgiven_and_the_run_drained(tmp_path: Path) -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        place = run_dir_of(world, tmp_path)
        await operate("ban", place.path, ANNA.key_id, "--reason", "noise in the cellar")
        with pytest.raises(RemoteError, match="noise in the cellar") as caught:
            await world.client(ANNA).heartbeat(HEARTBEAT)
        assert caught.value.code is ErrorCode.BANNED
        await operate("unban", place.path, ANNA.key_id)
        await world.join(ANNA)
        assert "no new work" in await operate("drain", place.path)
        assert (await world.client(ANNA).heartbeat(HEARTBEAT)).draining
        with pytest.raises(RemoteError) as unknown:
            await operate("ban", place.path, COORDINATOR.key_id)
        assert unknown.value.code is ErrorCode.UNKNOWN_WORKER
    with pytest.raises(LocalError, match="does not answer"):
        await operate("drain", place.path)


async def test_an_invitation_is_printed_as_a_link_that_joins(tmp_path: Path) -> None:
    async with running(memory_parts(make_run(), invites_needed=True)) as world:
        link = JoinLink.parse(await operate("invite", run_dir_of(world, tmp_path).path, "--keys", 2, "--days", 1))
        assert (link.url, link.run) == (world.url, world.run.digest)
        now_ms = world.parts.clock.now_ms()
        invite = open_invite(link.invite, world.run, now_ms=now_ms)
        assert (invite.keys_max, round((invite.expires_at_ms - now_ms) / 3_600_000)) == (2, 24)


async def test_an_invalid_key_id_and_a_folder_without_keys_are_reported(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        place = run_dir_of(world, tmp_path)
        words = ["operate", "ban", str(place.path), "x" * 52]
        result = await asyncio.to_thread(CliRunner().invoke, app, words)
        assert result.exit_code == 2
        place.key("coordinator").unlink()
        with pytest.raises(LocalError, match="neither keys"):
            await operate("invite", place.path)


async def test_a_worker_is_named_by_the_end_of_its_key_where_that_is_one_key(tmp_path: Path) -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        await world.join(BEN)
        place = run_dir_of(world, tmp_path)
        assert f"banned {ANNA.key_id}" in await operate("ban", place.path, ANNA.key_id[-8:])
        assert (await world.client(BEN).heartbeat(HEARTBEAT)).head == 0
        with pytest.raises(RemoteError):
            await world.client(ANNA).heartbeat(HEARTBEAT)
        for unclear in ("aaaaaaaa", BEN.key_id[-3:]):
            with pytest.raises(LocalError, match="must name one"):
                await operate("ban", place.path, unclear)


async def test_a_key_is_found_by_its_end_beyond_the_workers_that_status_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "WORKERS_SHOWN_MAX", 1)
    async with running(memory_parts(make_run()), ANNA, BEN) as world:
        place = run_dir_of(world, tmp_path)
        for worker in (ANNA, BEN):
            assert f"banned {worker.key_id}" in await operate("ban", place.path, worker.key_id[-8:])
            assert f"forgave {worker.key_id}" in await operate("unban", place.path, worker.key_id[-8:])


def lease_request(world: World, *, wait_s: float = 0.0) -> LeaseRequest:
    assert world.head is not None
    return LeaseRequest(policy_version=0, policy_digest=world.head.digest, rollouts_max=64, wait_s=wait_s)


async def test_a_paused_run_leases_nothing_accepts_what_is_out_and_stays_paused_over_a_restart(tmp_path: Path) -> None:
    run, folder = make_run(), tmp_path / "coordinator"
    folder.mkdir()
    async with running(await folder_parts(run, folder), ANNA, BEN) as world:
        place = run_dir_of(world, tmp_path)
        lease = await world.lease(ANNA)
        assert "paused" in await operate("pause", place.path, "--reason", "moving house")
        refused = await world.client(BEN).lease(lease_request(world))
        assert isinstance(refused, NotYet)
        assert refused.reason == "the operator has paused the run: moving house"
        assert not (await world.client(BEN).heartbeat(HEARTBEAT)).draining, "workers stay"
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        await world.judge()
        status = await world.status()
        assert (status["paused"], status["draining"], status["rollouts"]["accepted"]) == (
            True,
            False,
            lease.num_rollouts,
        )
        assert "paused the run: moving house" in status["waiting_for"][0]
        assert "paused" in await operate_status(place.path)
    async with running(await folder_parts(run, folder)) as world:
        assert (await world.status())["paused"]
        world.head = None
        await world.join(ANNA)
        place = run_dir_of(world, tmp_path)
        await operate("resume", place.path)
        assert not (await world.status())["paused"]


async def operate_status(folder: Path) -> str:
    result = await asyncio.to_thread(CliRunner().invoke, app, ["status", str(folder)])
    return str(result.stdout)


async def test_a_request_that_waits_while_the_run_is_paused_gets_its_lease_when_it_resumes(tmp_path: Path) -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        place = run_dir_of(world, tmp_path)
        await operate("pause", place.path)
        waiting = asyncio.create_task(world.client(ANNA).lease(lease_request(world, wait_s=20.0)))
        await operate("resume", place.path)
        await operate("resume", place.path)  # twice changes nothing
        assert not isinstance(await waiting, NotYet)


async def test_limits_on_who_joins_hold_until_they_are_replaced(tmp_path: Path) -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        place = run_dir_of(world, tmp_path)

        async def refusal() -> ErrorCode:
            with pytest.raises(RemoteError) as caught:
                await world.join(BEN)
            return caught.value.code

        assert "workers_max = 1" in await operate("limit", place.path, "--workers", 1)
        assert await refusal() is ErrorCode.UNAVAILABLE
        await operate("limit", place.path, "--invites")
        assert await refusal() is ErrorCode.NOT_INVITED
        assert (await world.status())["joining"]["invites_needed"]
        link = JoinLink.parse(await operate("invite", place.path))
        request = JoinRequest(name="Ben", software="1", engine=ENGINE, rollouts_max=64, invite=link.invite)
        await world.client(BEN).join(request)
        assert "settings" in await operate("limit", place.path)
        assert set((await world.status())["joining"].values()) == {None}


async def test_a_snapshot_is_saved_at_once(tmp_path: Path) -> None:
    parts = memory_parts(make_run())
    async with running(parts, ANNA) as world:
        assert await parts.store.latest_snapshot() is None
        await operate("snapshot", run_dir_of(world, tmp_path).path)
        saved = await parts.store.latest_snapshot()
        assert saved is not None
        assert ANNA.key_id in saved[1]
        await operate("snapshot", run_dir_of(world, tmp_path).path)  # nothing new to save
