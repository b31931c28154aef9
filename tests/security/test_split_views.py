"""A coordinator that shows two heads, a trainer key that signs two manifests of one version: detection and kept evidence."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.builder import build_manifest, provenance
from tests.node.coordinator_world import ANNA, BEN, CONFIG_JSON, COORDINATOR, TRAINER
from tests.node.swarm_world import LOCAL, Swarm, ended, policy_weights, swarm
from tests.node.table_engine import table_weights
from tests.node.worker_world import MemorySource, following, make_follower, make_run, settle
from tests.time_world import until

from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_client import HttpClient
from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import Trust
from prime_node.cli import wire_swarm
from prime_node.worker.config import WorkerConfig
from prime_protocol.checkpoint import EncodedCheckpoint, encode_checkpoint
from prime_protocol.digest import digest_of
from prime_protocol.envelope import PayloadType, open_envelope, seal
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint
from prime_protocol.manifest import SignedManifest, sign_manifest
from prime_protocol.timestamp import Timestamp

RUN = make_run()


class OtherFace:
    """A second view of the same coordinator: it forwards everything except the statement on the newest policy."""

    def __init__(self, made: Swarm, head: SignedManifest, encoded: EncodedCheckpoint) -> None:
        self.made = made
        self.head = head
        self.blobs = {digest_of(blob): blob for blob in encoded.blobs}

    async def answer(self, request: web.Request) -> web.Response:
        if request.path in ("/v1/head", f"/v1/manifests/{self.head.manifest.policy_version}"):
            return web.Response(body=self.head.envelope.to_bytes())
        if request.path == "/v1/timestamp":
            return web.Response(body=self.timestamp())
        blob = self.blobs.get(request.path.rpartition("/")[2])
        if blob is not None:
            wanted = request.http_range
            part = blob[wanted]
            if "Range" not in request.headers:
                return web.Response(body=blob)
            start = wanted.start or 0
            headers = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(blob)}"}
            return web.Response(body=part, status=206, headers=headers)
        body = await request.read()
        url = self.made.world.url + request.path_qs
        sent = {
            name: value for name, value in request.headers.items() if name.lower() not in ("host", "content-length")
        }
        async with self.made.world.session.request(request.method, url, data=body or None, headers=sent) as answer:
            return web.Response(body=await answer.read(), status=answer.status)

    def timestamp(self) -> bytes:
        now_ms = SystemClock().now_ms()
        point = ChainPoint(policy_version=self.head.manifest.policy_version, manifest=self.head.digest)
        stamp = Timestamp(
            run=self.made.world.run.digest, head=point, key_ring=0, issued_at_ms=now_ms, expires_at_ms=now_ms + 600_000
        )
        return seal(stamp, PayloadType.TIMESTAMP, COORDINATOR).to_bytes()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


def forked(made: Swarm) -> tuple[SignedManifest, EncodedCheckpoint]:
    """Another policy 0, signed by the trainer."""
    weights = policy_weights(7)
    encoded = encode_checkpoint(weights, part_bytes=2**19)
    manifest = build_manifest(
        made.world.run, None, weights, encoded, produced_by=provenance(0), created_at_ms=SystemClock().now_ms()
    )
    return sign_manifest(manifest, TRAINER), encoded


@contextlib.asynccontextmanager
async def member(made: Swarm, key: SigningKey, url: str) -> AsyncIterator[tuple[Follower, Trust, Path]]:
    """Return a client of the coordinator at this URL."""
    run, folder = made.world.run, made.folder / key.key_id[-8:]
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_bytes(CONFIG_JSON)
    settings = WorkerConfig(swarm=LOCAL, poll_seconds=0.05)
    async with (
        HttpClient(url, run=run.digest, clock=SystemClock(), key=key, bounds=run.spec.limits) as client,
        wire_swarm.swarm_follower(run, key, client, folder, settings) as (follower, trust, peer),
    ):
        assert peer is not None
        task = asyncio.create_task(follower.follow())
        try:
            yield follower, trust, folder
        finally:
            await ended(task)


def statements(folder: Path) -> list[Path]:
    """Return the kept statements of the coordinator."""
    return list(folder.glob("trust/evidence/*"))


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MIN", 0.05)
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MAX", 0.2)


@pytest.mark.slow
async def test_two_linked_followers_that_are_shown_two_heads_keep_both_statements_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path) as made:
        head = await made.publish()
        other, encoded = forked(made)
        async with (
            OtherFace(made, other, encoded).serving() as lying,
            member(made, ANNA, made.world.url) as anna,
            member(made, BEN, lying) as ben,
        ):
            for follower, _, _ in (anna, ben):
                await until(lambda follower=follower: follower.heads.newest == 0)
            assert {one[0].heads.chain.digest(0) for one in (anna, ben)} == {head.digest, other.digest}
            for _, _, folder in (anna, ben):
                await until(lambda folder=folder: len(list(folder.glob("checkpoints/evidence/fork-*"))) == 2)
                shown = {path.read_bytes() for path in folder.glob("checkpoints/evidence/fork-*")}
                assert shown == {head.envelope.to_bytes(), other.envelope.to_bytes()}
            for _, trust, folder in (anna, ben):
                await until(lambda trust=trust: trust.peers())

                async def is_kept(trust: Trust = trust, folder: Path = folder) -> bool:
                    await trust.refresh()
                    return len(statements(folder)) >= 2

                await made.world.until(is_kept)
                points = {
                    Timestamp.model_validate_json(open_envelope(path.read_bytes()).payload).head
                    for path in statements(folder)
                }
                assert {point.manifest for point in points if point is not None} == {head.digest, other.digest}
            assert anna[0].heads.chain.digest(0) == head.digest, "nobody is converted by the other's head"
            assert ben[0].heads.chain.digest(0) == other.digest
    assert "fork: two signed manifests for policy 0" in caplog.text
    assert "the coordinator contradicts itself (two timestamps name different manifests for policy 0)" in caplog.text


async def test_a_second_manifest_of_one_version_is_refused_and_both_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    honest, forking = MemorySource(RUN), MemorySource(RUN)
    first, second = honest.publish(table_weights(0)), forking.publish(table_weights(666))
    async with following(make_follower(tmp_path, honest)) as follower:
        await follower.wait_newer(-1)
    async with following(make_follower(tmp_path, honest, forking)) as follower:
        await settle(honest)
        assert follower.heads.chain.digest(0) == first.digest
    evidence = {path.read_bytes() for path in (tmp_path / "evidence").iterdir()}
    assert evidence == {first.envelope.to_bytes(), second.envelope.to_bytes()}
    assert "fork: two signed manifests for policy 0" in caplog.text


async def test_verify_says_that_a_key_signed_two_manifests_of_one_version(tmp_path: Path) -> None:
    source, forking = MemorySource(RUN), MemorySource(RUN)
    first, second = source.publish(table_weights(0)), forking.publish(table_weights(666))
    source.blobs |= forking.blobs
    source.shown_head = second.envelope  # while the manifest under the same number is the first
    source.save(tmp_path / "public")
    report = await audit(FolderSource(tmp_path / "public"), RUN.digest)
    assert report.failure is not None
    assert "two" in report.failure.detail
    assert {one.payload for one in report.evidence} == {first.envelope.payload, second.envelope.payload}


async def test_the_coordinator_takes_no_second_manifest_of_a_version(tmp_path: Path) -> None:
    async with swarm(tmp_path) as made:
        await made.publish()
        other, encoded = forked(made)
        client = made.world.client(TRAINER)
        for blob in encoded.blobs:
            await client.put_blob(blob)
        with pytest.raises(Exception, match="policy 0"):
            await client.publish(other.envelope)
        async with aiohttp.ClientSession() as session, session.get(f"{made.world.url}/v1/manifests/0") as answer:
            assert made.head is not None
            assert await answer.read() == made.head.envelope.to_bytes()
