"""Several coordinators of one run: one leads, the others follow and take over. Real processes on PostgreSQL and S3."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import asyncpg
import pytest
from tests.node.coordinator_process import crash_run
from tests.node.coordinator_world import (
    ANNA,
    BEN,
    TRAINER,
    VALIDATOR,
    World,
    folder_parts,
    make_manifest,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.crowd_world import Crowd, check_promises
from tests.node.gateway_world import LISTENS, gateway_parts, hearing, serving
from tests.node.standby_world import Pair, Place, answers_of_stopped

from prime_lab.postgres_server import PASSWORD, PostgresServer, open_postgres
from prime_lab.s3_server import BUCKET, S3Server
from prime_node.adapters.storage.folder_blobs import FolderDocuments
from prime_node.adapters.storage.leader_terms import ANSWER_SHARE, HeldTerm, TermRow, WatchedTerm
from prime_node.adapters.storage.postgres_leader import TermKeeper
from prime_node.adapters.storage.postgres_store import SESSION, postgres_database
from prime_node.adapters.web.noted_resolver import NotedResolver
from prime_node.cli.outcome import MAY_PASS, outcome_of
from prime_node.cli.wire_store import open_blobs, open_storage
from prime_node.coordinator.assembly import Parts
from prime_node.coordinator.config import CoordinatorConfig
from prime_protocol.errors import LocalError
from prime_protocol.manifest import SignedManifest

TERM_S = 1.0


def test_a_leader_answers_for_less_time_than_a_standby_waits() -> None:
    row = TermRow(epoch=7, holder="a", renewals=1, term_ms=2_000)
    held, watched = HeldTerm(2.0, 7), WatchedTerm()
    held.renewed(sent_s=100.0)
    assert not watched.is_over(row, asked_s=100.0, seen_s=100.2)
    last_s = 100.0 + ANSWER_SHARE * 2.0
    assert held.may_answer(last_s - 0.001)
    assert not held.may_answer(last_s)
    assert not watched.is_over(row, asked_s=102.1, seen_s=102.3), "the row was seen 1.9 s before this was asked"
    assert watched.is_over(row, asked_s=102.2, seen_s=102.3)


def test_a_renewal_that_was_slow_counts_from_when_it_was_sent() -> None:
    held = HeldTerm(2.0, 7)
    held.renewed(sent_s=101.0)
    held.renewed(sent_s=100.0)  # answered later
    assert held.answers_until_s == 101.0 + ANSWER_SHARE * 2.0


def test_a_lost_term_never_answers_again() -> None:
    held = HeldTerm(2.0, 7)
    held.renewed(sent_s=100.0)
    held.lost()
    held.renewed(sent_s=100.5)
    assert not held.may_answer(100.6)


def test_each_renewal_and_each_new_term_makes_a_standby_wait_again() -> None:
    watched = WatchedTerm()
    for second, row in enumerate([TermRow(7, "a", 1, 500), TermRow(7, "a", 2, 500), TermRow(8, "b", 3, 500)]):
        assert not watched.is_over(row, asked_s=float(second), seen_s=float(second))
    assert watched.num_renewals == 2
    assert watched.is_over(TermRow(8, "b", 3, 500), asked_s=2.5, seen_s=2.5)


def test_a_term_that_was_ended_is_over_at_once() -> None:
    assert WatchedTerm().is_over(TermRow(7, "a", 5, 0), asked_s=1.0, seen_s=1.1)


def test_standbys_need_a_store_and_blobs_that_they_share() -> None:
    for settings in ({}, {"store": "postgresql://prime@db/mine"}, {"blobs": "s3://bucket"}):
        with pytest.raises(LocalError, match="standby needs what all coordinators of the run share"):
            CoordinatorConfig.load({"coordinator": {"standby": True, **settings}})


async def test_a_policy_that_comes_in_a_gap_between_terms_is_published_and_nothing_is_deleted_there() -> None:
    run, place = make_run(async_level=0), Place()
    parts = dataclasses.replace(memory_parts(run, checkpoints_kept=1), leadership=place)

    async def is_forgotten() -> bool:
        return "encodings_forgotten" in [
            json.loads(event.payload)["type"] async for event in parts.store.events(after=0)
        ]

    async with running(parts, ANNA) as world:
        for step in range(2):
            await world.fill(step)
            await world.publish()
        await world.fill(2)
        world.head, blobs = make_manifest(run, world.head, batch=world.batch)
        for blob in blobs:
            await world.client(TRAINER).put_blob(blob)
        assert not await is_forgotten()
        before = [digest async for digest in parts.public.digests()]
        place.lasts = False
        with pytest.raises(aiohttp.ClientError):
            await world.post("/v1/manifests", world.head.envelope.to_bytes())
        await world.until(is_forgotten)
        assert [digest async for digest in parts.public.digests()] == before
        place.lasts = True
        head = await world.client(ANNA).head()
        assert head is not None
        assert head.digest == world.head.digest
        await world.fill(3)
        await world.publish()


@pytest.mark.timeout(180)  # with the start of the server, which a busy machine may delay
async def test_a_standby_waits_while_no_host_takes_writes_and_ends_with_the_error_of_a_thread_that_failed(
    postgres: PostgresServer,
) -> None:
    url = postgres.make_database()
    await (await open_postgres(url, run="ab" * 32)).close()
    asked = [f"{url}?target_session_attrs=standby"]

    async def connect() -> asyncpg.Connection:
        return await asyncpg.connect(asked.pop() if asked else url)

    async def fail() -> asyncpg.Connection:
        return await asyncpg.connect(asked[0])

    keeper = TermKeeper(connect, term_s=5.0, place="db")
    assert await keeper.begun(is_patient=True) > 1
    await keeper.end()
    failed = TermKeeper(fail, term_s=5.0, place="db")
    with pytest.raises(IndexError):
        await failed.begun(is_patient=True)
    with pytest.raises(IndexError):
        await failed.lost()
    connection = await asyncpg.connect(url)
    await connection.execute("DELETE FROM leader")
    await connection.close()
    with pytest.raises(LocalError, match="no row of the coordinators' term"):
        await TermKeeper(partial(asyncpg.connect, url), term_s=5.0, place="db").begun(is_patient=True)


@pytest.mark.parametrize("number", ["epoch", "renewals"])
async def test_a_term_whose_numbers_are_used_up_ends_the_coordinator_with_what_to_do(
    postgres: PostgresServer, number: str
) -> None:
    url = postgres.make_database()
    await (await open_postgres(url, run="ab" * 32)).close()
    postgres.execute(f"UPDATE leader SET {number} = 9223372036854775807", database=url.rsplit("/", 1)[1])
    keeper = TermKeeper(partial(asyncpg.connect, url), term_s=5.0, place="db")
    with pytest.raises(LocalError, match="holds a term that no coordinator wrote"):
        await keeper.begun(is_patient=True)


async def test_a_first_copy_of_documents_that_was_killed_is_made_again(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    run, url = make_run(), postgres.make_database()
    written = FolderDocuments(tmp_path / "public")
    for name in ("a.json", "c.json"):
        await written.write(name, name.encode())
    (tmp_path / "public" / "b.json").symlink_to("a.json")  # it cannot be read
    settings = CoordinatorConfig.load({"coordinator": {"store": url}})
    for ends in (False, True):
        storage = await open_storage(settings, run, tmp_path, public=tmp_path / "public")
        assert storage.leadership is not None
        with contextlib.nullcontext() if ends else pytest.raises(KeyError):
            await storage.leadership.led()
        (tmp_path / "public" / "b.json").unlink(missing_ok=True)
        await storage.store.close()
    other = await asyncpg.connect(url)
    assert [row[0] for row in await other.fetch("SELECT name FROM documents ORDER BY name")] == ["a.json", "c.json"]
    await other.close()


async def test_a_leader_that_is_stopped_within_a_transaction_is_replaced(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the row of its term stayed locked for as long as its process was stopped."""
    monkeypatch.setitem(SESSION, "idle_in_transaction_session_timeout", "1s")
    url, has_begun = postgres.make_database(), asyncio.Event()
    stopped = await postgres_database(url, run="ab" * 32)

    async def never_whole() -> AsyncIterator[tuple[str, str, bytes]]:
        yield "public", "a.json", b"a"
        has_begun.set()
        await asyncio.Event().wait()

    writing = asyncio.ensure_future(stopped.write_first_documents(never_whole()))
    await has_begun.wait()
    assert stopped.keeper is not None
    await stopped.keeper.end()
    following = TermKeeper(partial(asyncpg.connect, url), term_s=5.0, place="db")
    async with asyncio.timeout(30.0):
        await following.begun(is_patient=True)
    await following.end()
    writing.cancel()
    await asyncio.wait({writing})
    await stopped.close()


async def published(parts: Parts, url: str) -> SignedManifest:
    """Publish a policy through a coordinator whose term another one then ends, and wait for its end."""
    serving = running(parts)
    world = await serving.__aenter__()
    manifest = await world.publish()
    other = await asyncpg.connect(url)
    await other.execute("UPDATE leader SET epoch = epoch + 1, term_ms = 0")
    await other.close()
    await world.until(lambda: is_silent(world), seconds=20.0)
    with pytest.raises(ExceptionGroup) as ended:
        await serving.__aexit__(None, None, None)
    code, line = outcome_of(ended.value) or (0, "")
    assert code == MAY_PASS
    assert "has taken over" in line
    return manifest


async def is_silent(world: World) -> bool:
    try:
        await world.get("/healthz")
    except aiohttp.ClientError:
        return True
    return False


async def test_a_leader_that_is_replaced_ends_and_its_documents_reach_the_next_one(
    tmp_path: Path, postgres: PostgresServer
) -> None:
    url = postgres.make_database()
    run = make_run()
    first = await published(await folder_parts(run, tmp_path / "a", store=url), url)
    async with running(await folder_parts(run, tmp_path / "b", store=url)) as world:
        client = world.client(ANNA)
        head = await client.head()
        assert head is not None
        assert head.digest == first.digest
        assert (await world.get("/readyz"))[0] == 200


@pytest.mark.parametrize(
    ("link", "named", "asked"),
    [
        ("http://203.0.113.5:8400", "http://192.168.1.1", False),  # a stranger's run and the router at home
        ("http://8.8.8.8:8400", "http://127.0.0.1:631", False),
        ("http://8.8.8.8:8400", "http://1.1.1.1:8400", True),
        ("http://192.168.1.7:8400", "http://192.168.1.8:8400", True),
        ("http://8.8.8.8:8400", "http://localhost:631", False),  # by name
        ("http://127.0.0.1:1", "http://localhost:1", True),
        ("http://8.8.8.8:8400", "http://127.1:631", False),  # other spellings, which no resolver sees
        ("http://8.8.8.8:8400", "http://169.16689662", False),
        ("http://8.8.8.8:8400", "http://127.0.0.1.:631", False),
    ],
)
async def test_a_run_directs_no_client_into_the_network_around_it(link: str, named: str, asked: bool) -> None:
    host = urlsplit(named).hostname or ""
    resolver = NotedResolver(urlsplit(link).hostname or "")
    assert resolver.may_ask(host) == (asked or host == "localhost")
    if host == "localhost":
        with contextlib.nullcontext() if asked else pytest.raises(OSError, match="leads into another network"):
            assert [one["host"] for one in await resolver.resolve(host)] == ["127.0.0.1"]


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_standby_takes_over_from_a_killed_and_from_a_stopped_leader_without_loss(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    settings = {
        "store": postgres.make_database(),
        "blobs": f"s3://{BUCKET}/{tmp_path.name}",
        "standby": "true",
        "term_seconds": str(TERM_S),
    }
    pair = Pair(tmp_path, settings, {"PGPASSWORD": PASSWORD, **s3.environment})
    await pair.start(0)
    await pair.start(1)
    run = make_run(**crash_run())
    async with aiohttp.ClientSession() as session:
        assert await pair.leader(session) == 0
        async with session.post(pair.urls[1] + "/v1/rollouts", data=b"x" * 100_000) as answer:
            assert (answer.status, (await answer.json())["code"]) == (503, "unavailable")
        world = World(run, memory_parts(run), pair.urls[0], session)
        for key in (ANNA, BEN, VALIDATOR, TRAINER):
            world.client(key).also_at(pair.urls)
        crowd = Crowd(world, 1)
        try:
            async with crowd.working():
                for _ in range(2):
                    await crowd.progress(3)
                    killed = await pair.leader(session)
                    pair.daemons[killed].send(signal.SIGKILL)
                    await pair.daemons[killed].wait()
                    await crowd.progress(1)  # the other one leads
                    await pair.start(killed, pair.ports[killed])
                assert await answers_of_stopped(pair, world, crowd.progress(2), stop_s=3 * TERM_S) == [b""] * 5
                await crowd.progress(1)
                await crowd.stop()
                await check_promises(crowd)
        finally:
            await pair.kill()


async def test_gateways_on_postgresql_and_s3_store_bundles_in_the_bucket_and_serve_from_it(
    tmp_path: Path, postgres: PostgresServer, s3: S3Server
) -> None:
    run, blobs = make_run(), f"s3://{BUCKET}/{tmp_path.name}"
    parts = await folder_parts(run, tmp_path, store=postgres.make_database(), blobs=blobs, **LISTENS)
    parts, server = hearing(parts)
    async with running(parts) as writer, contextlib.AsyncExitStack() as stack:
        shared = [await open_blobs(blobs, run, Path(name)) for name in ("bundles", "blobs")]
        gateway = gateway_parts(run, [server.port], bundles=shared[0], public=shared[1], blobs=blobs)
        world = World(run, parts, await stack.enter_async_context(serving(gateway)), writer.session)
        for key in (ANNA, TRAINER, VALIDATOR):
            stack.push_async_callback(world.client(key).close)
        manifest = await world.publish()
        part = manifest.manifest.encodings[0].parts[0].digest
        assert (await world.get(f"/v1/blobs/{part}"))[1] == await shared[1].get(part)
        await world.join(ANNA)
        lease = await world.lease(ANNA)
        parcel = make_parcel(lease, ANNA)
        reply = await world.client(ANNA).upload(parcel)
        assert await shared[0].get(reply.bundle) == parcel
        assert (await world.judge()).bundle == reply.bundle
