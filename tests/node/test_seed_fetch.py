"""`seed` keeps and serves without decoding; `fetch` downloads from any peer that has the policy, verifies and exports."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.node.coordinator_world import CONFIG_JSON, TRAINER
from tests.node.swarm_world import ANNA, BEN, CORA, LOCAL, Swarm, ended, linked, swarm
from tests.time_world import until

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.audit.safetensors_file import read_weights
from prime_node.broadcast.seed.seeder import Seeder
from prime_node.broadcast.swarm.peer import Peer
from prime_node.broadcast.swarm.piece_sets import span
from prime_node.cli import wire, wire_swarm
from prime_node.cli.fetch import fetch_policy
from prime_node.worker.config import WorkerConfig
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError, RemoteError
from prime_protocol.run_spec import JoinLink
from prime_protocol.weights import root_of

SETTINGS = WorkerConfig(swarm=LOCAL, poll_seconds=0.05)


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make peers look for each other continuously."""
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MIN", 0.05)
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MAX", 0.2)
    monkeypatch.setattr("prime_node.cli.fetch.PEERS_S", 0.3)


async def seeder(made: Swarm, folder: Path) -> tuple[Seeder, Peer]:
    """Run what `prime-node seed` runs."""
    run = made.world.run
    client = await made.stack.enter_async_context(
        HttpClient(made.world.url, run=run.digest, clock=SystemClock(), key=CORA, bounds=run.spec.limits)
    )
    await wire.pinned_run(client, run.digest, folder)
    mirror, peer = await made.stack.enter_async_context(wire_swarm.seeder(run, CORA, client, folder, SETTINGS))
    made.stack.push_async_callback(ended, asyncio.create_task(mirror.follow()))
    return mirror, peer


async def test_a_seeder_serves_every_encoding_to_workers_when_no_other_source_does(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        mirror, peer = await seeder(made, tmp_path / "seed")
        await made.publish()
        published = await made.publish(delta=True)
        await until(lambda: mirror.seed_store.newest == 1)
        made.chunks.is_cut = True
        await made.seeder.web.stop(grace_s=0.0)
        follower, _ = await made.worker(ANNA)
        async with asyncio.timeout(20):
            assert root_of((await follower.wait_newer(-1)).weights) == published.manifest.state_root
        assert follower.received[CORA.key_id] > 0
        async with wire.public_source(f"http://127.0.0.1:{peer.port}/#{made.world.run.digest}") as source:
            report = await audit(source, made.world.run.digest)
        assert report.passed, report.checks[-1]


async def test_a_trainer_that_starts_again_seeds_what_it_had_published(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        first = await made.publish()
        await made.publish(delta=True)
        run, client = made.world.run, made.world.client(TRAINER)
        again, _ = wire_swarm.trainer_seeding(run, TRAINER, client, LOCAL, tmp_path / "trainer")
        await again.restore()
        assert again.seed_store.newest == 1
        assert sum(one.has == span(0, len(one.pieces)) for one in again.have_set) == 2
        assert again.seed_store.manifest_at_hand(0) == first.envelope


async def test_what_a_disk_has_damaged_is_not_seeded_again(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.publish()
        second = await made.publish(delta=True)
        path = tmp_path / "trainer" / "seed" / "parts" / second.manifest.encodings[0].parts[0].digest
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        run, client = made.world.run, made.world.client(TRAINER)
        again, _ = wire_swarm.trainer_seeding(run, TRAINER, client, LOCAL, tmp_path / "trainer")
        await again.restore()
        assert again.seed_store.newest == 0
        assert sum(one.has == span(0, len(one.pieces)) for one in again.have_set) == 1


async def test_a_part_that_is_removed_under_a_seeder_is_stored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was announced for as long as the seeder ran, and no peer got it."""
    monkeypatch.setattr("prime_node.broadcast.seed.seeder.HEAD_WAIT_S", 0.05)
    monkeypatch.setattr("prime_node.broadcast.seed.seeder.POLL_S", 0.05)
    async with swarm(tmp_path) as made:
        mirror, peer = await seeder(made, tmp_path / "seed")
        part = (await made.publish()).manifest.encodings[0].parts[0].digest
        await until(lambda: mirror.seed_store.newest == 0)
        path = tmp_path / "seed" / "checkpoints" / "parts" / part
        path.unlink()
        async with wire.public_source(f"http://127.0.0.1:{peer.port}/#{made.world.run.digest}") as source:
            with pytest.raises(RemoteError):
                await source.blob(part)
            assert f"{path} is damaged, or was removed" in caplog.text
            await until(lambda: path.exists() and mirror.seed_store.newest == 0)
            assert digest_of(await source.blob(part)) == part


async def test_a_seeder_finds_what_its_disk_changes_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Peers got wrong bytes from it, and avoided it, until it was started again."""
    for name, seconds in (("HEAD_WAIT_S", 0.05), ("POLL_S", 0.05), ("CHECK_S", 0.0)):
        monkeypatch.setattr(f"prime_node.broadcast.seed.seeder.{name}", seconds)
    async with swarm(tmp_path) as made:
        mirror, _ = await seeder(made, tmp_path / "seed")
        part = (await made.publish()).manifest.encodings[0].parts[0].digest
        await until(lambda: mirror.seed_store.newest == 0)
        path = tmp_path / "seed" / "checkpoints" / "parts" / part
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        await until(lambda: path.exists() and path.read_bytes() == whole)
        assert f"{path} is damaged, or was removed" in caplog.text


async def test_fetch_exports_a_policy_that_peers_have(tmp_path: Path) -> None:
    async with swarm(tmp_path, ANNA, BEN) as made:
        await linked(made)
        await made.publish()
        first = made.weights
        await made.publish()
        for follower, _ in made.workers:
            await until(lambda follower=follower: 1 in follower.versions())
        made.chunks.is_cut = True
        (tmp_path / "fetch" / "model").mkdir(parents=True)
        (tmp_path / "fetch" / "model" / "config.json").write_bytes(CONFIG_JSON)
        link = JoinLink(made.world.url, made.world.run.digest)
        for version, out in ((None, tmp_path / "newest"), (0, tmp_path / "first")):
            place, num_files = await fetch_policy(link, SETTINGS, tmp_path / "fetch", version, out)
            assert place == out
            assert num_files >= 3
        assert root_of(read_weights(tmp_path / "newest")) == root_of(made.weights)
        assert root_of(read_weights(tmp_path / "first")) == root_of(first)
        assert (tmp_path / "newest" / "PROVENANCE.json").exists()


async def test_fetch_begins_at_a_peer_while_the_coordinator_is_away(tmp_path: Path) -> None:
    async with swarm(tmp_path, ANNA) as made:
        await linked(made)
        await made.publish()
        follower, peer = made.workers[0]
        await until(lambda: 0 in follower.versions())
        await made.lose_coordinator()
        settings = SETTINGS.model_copy(update={"mirrors": (f"http://127.0.0.1:{peer.port}",)})
        link = JoinLink(made.world.url, made.world.run.digest)
        await fetch_policy(link, settings, tmp_path / "fetch", None, tmp_path / "newest")
        assert root_of(read_weights(tmp_path / "newest")) == root_of(made.weights)


async def test_a_bucket_of_files_is_a_mirror(tmp_path: Path) -> None:
    """Serve a folder with ranges, without our code."""
    blobs = tmp_path / "bucket" / "v1" / "blobs"
    blobs.mkdir(parents=True)
    app = web.Application()
    app.router.add_static("/", tmp_path / "bucket")
    async with swarm(tmp_path) as made, TestServer(app, host="127.0.0.1") as bucket:
        published = await made.publish()
        for part in (tmp_path / "trainer" / "seed" / "parts").iterdir():
            shutil.copy(part, blobs)
        made.chunks.is_cut = True
        await made.seeder.web.stop(grace_s=0.0)
        url = str(bucket.make_url("/")).rstrip("/")
        follower, _ = await made.worker(ANNA, mirrors=(url,))
        async with asyncio.timeout(20):
            assert root_of((await follower.wait_newer(-1)).weights) == published.manifest.state_root
        assert follower.received == {url: sum(part.size for part in published.manifest.encodings[0].parts)}


async def test_fetch_says_what_is_not_there_yet(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        link = JoinLink(made.world.url, made.world.run.digest)
        with pytest.raises(LocalError, match="nothing is published yet"):
            await fetch_policy(link, SETTINGS, tmp_path / "fetch", None, tmp_path / "out")
        await made.publish()
        with pytest.raises(LocalError, match="policy 7 is not published yet; the newest is 0"):
            await fetch_policy(link, SETTINGS, tmp_path / "fetch", 7, tmp_path / "out")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").write_bytes(b"x")
        with pytest.raises(LocalError, match="not empty"):
            await fetch_policy(link, SETTINGS, tmp_path / "fetch", None, tmp_path / "full")
