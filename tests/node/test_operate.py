"""`prime-node operate`: the operator's hand on a running coordinator."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, HEARTBEAT, make_run, memory_parts, running
from tests.node.operator_world import operate, run_dir_of
from typer.testing import CliRunner

from prime_node.cli.main import app
from prime_node.coordinator.api import status
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.invite import open_invite


async def test_a_worker_is_banned_and_forgiven_and_the_run_drained(tmp_path: Path) -> None:
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await world.join(ANNA)
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


async def test_an_invitation_is_printed_as_one_word_that_joins(tmp_path: Path) -> None:
    async with running(memory_parts(make_run(), invites_needed=True)) as world:
        text = (await operate("invite", run_dir_of(world, tmp_path).path, "--keys", 2, "--days", 1)).strip()
        now_ms = world.parts.clock.now_ms()
        invite = open_invite(text, world.run, now_ms=now_ms)
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
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await world.join(ANNA)
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
    async with running(memory_parts(make_run())) as world:
        await world.publish()
        await world.join(ANNA, BEN)
        place = run_dir_of(world, tmp_path)
        for worker in (ANNA, BEN):
            assert f"banned {worker.key_id}" in await operate("ban", place.path, worker.key_id[-8:])
            assert f"forgave {worker.key_id}" in await operate("unban", place.path, worker.key_id[-8:])
