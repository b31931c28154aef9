"""A copy of a run on PostgreSQL and S3, taken while it works, by the commands of docs/operating.md; and what comes back of it."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path
from typing import cast

import aiohttp
import obstore
import pytest
from obstore.store import S3Store
from tests.node.coordinator_process import REPOSITORY, crash_run, start
from tests.node.coordinator_world import ANNA, BEN, TRAINER, VALIDATOR, World, make_run, memory_parts
from tests.node.crowd_world import Crowd, check_promises

from prime_lab.postgres_server import PASSWORD, PostgresServer
from prime_lab.s3_server import BUCKET, S3Server

MARK = "<!-- run by tests/node/test_backup.py -->"


def commands() -> list[str]:
    """Return the commands of the document: the copy first."""
    text = (REPOSITORY / "docs/operating.md").read_text(encoding="utf-8")
    block = text.partition(f"{MARK}\n```\n")[2].partition("```")[0]
    return [line.partition("  #")[0] for line in block.splitlines()]


async def run_commands(lines: list[str], server: PostgresServer, database: str, folder: Path) -> None:
    host, _, name = database.removeprefix("postgresql://").rpartition("/")
    script = "\n".join(lines).replace("prime@db.example.org", host).replace("mine", name)
    environment = {"PATH": f"{server.programs}:{os.environ['PATH']}", "PGPASSWORD": PASSWORD}
    command = ("bash", "-euc", script)
    ran = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr


async def copy_objects(source: str, target: str) -> None:
    """Copy a prefix of the bucket, as any tool for buckets does."""
    store = S3Store(BUCKET, client_options={"allow_http": True})
    for one in cast("list[dict[str, str]]", await obstore.list(store, f"{source}/").collect_async()):
        await obstore.copy_async(store, one["path"], target + one["path"].removeprefix(source))


async def ledger_lines(session: aiohttp.ClientSession, url: str) -> list[bytes]:
    lines: list[bytes] = []
    while True:
        async with session.get(f"{url}/v1/ledger/{len(lines)}") as answer:
            page = (await answer.read()).splitlines() if answer.status == 200 else []
        if not page:
            return lines
        lines += page


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_copy_that_was_taken_while_the_run_worked_holds_all_that_was_acknowledged_before(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    environment = {"PGPASSWORD": PASSWORD, **s3.environment}
    database, blobs = postgres.make_database(), f"{tmp_path.name}-live"
    settings = {"store": database, "blobs": f"s3://{BUCKET}/{blobs}"}
    daemon, port = await start(tmp_path / "live", 0, settings=settings, environment=environment)
    run = make_run(**crash_run())
    async with aiohttp.ClientSession() as session:
        world = World(run, memory_parts(run), f"http://127.0.0.1:{port}", session)
        crowd = Crowd(world, 1)
        try:
            for key in (ANNA, BEN, VALIDATOR, TRAINER):
                world.client(key)
            async with crowd.working():
                await crowd.progress(6, accepted_min=11)
                promised = Crowd(world, 1)
                promised.uploaded, promised.accepted = dict(crowd.uploaded), set(crowd.accepted)
                promised.batches = dict(crowd.batches)
                before = await ledger_lines(session, world.url)
                copy, *restore = commands()
                await run_commands([copy], postgres, database, tmp_path)
                await copy_objects(blobs, f"{tmp_path.name}-again")
                await crowd.progress(1)
                await crowd.stop()
                live = await ledger_lines(session, world.url)
        finally:
            daemon.kill()
            await daemon.wait()
        await run_commands(restore, postgres, database, tmp_path)
        settings = {"store": f"{database}_again", "blobs": f"s3://{BUCKET}/{tmp_path.name}-again"}
        daemon, port = await start(tmp_path / "again", 0, settings=settings, environment=environment)
        try:
            promised.world = World(run, memory_parts(run), f"http://127.0.0.1:{port}", session)
            await check_promises(promised)
            restored = await ledger_lines(session, promised.world.url)
            assert before == restored[: len(before)]
            assert restored == live[: len(restored)]
            for client in promised.world.clients.values():
                await client.close()
        finally:
            daemon.kill()
            await daemon.wait()
