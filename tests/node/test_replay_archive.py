"""The coordinator's public material for re-execution: what it serves, to whom, and for how long."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.node.archive_world import PART, RECIPE, offer, replayable, state_of
from tests.node.batch_coordinator import BatchCoordinator
from tests.node.batch_coordinator import make_run as make_batch_run
from tests.node.coordinator_process import WrongClock
from tests.node.coordinator_world import (
    ANNA,
    TRAINER,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)

from prime_lab.memory_blobs import MemoryBlobs, MemoryDocuments
from prime_node.adapters.prometheus_metrics import PrometheusMetrics
from prime_node.adapters.storage.folder_source import FolderSource
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.broadcast.seed.seeding import Seeding
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.coordinator.api import documents
from prime_node.coordinator.assembly import Parts
from prime_node.ports.documents import batch_name, manifest_name
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.replay import BundleAccess
from prime_protocol.run_spec import PinnedRun


async def test_a_published_step_has_its_batch_and_bundles_in_public_for_the_promised_days(tmp_path: Path) -> None:
    run = replayable()
    parts = await folder_parts(run, tmp_path, checkpoints_kept=1)
    async with running(parts) as world:
        await world.client(TRAINER).put_blob(RECIPE)
        await offer(world)
        await world.join(ANNA)
        batch = await world.fill(0)
        with pytest.raises(RemoteError, match="is not published"):
            await world.client(TRAINER).public_batch(0, 0)
        await offer(world)
        served = await world.client(TRAINER).public_batch(0, 0)
        assert served.digest == world.batch
        copied = await FolderSource(tmp_path / "public").public_batch(0, 0)
        assert copied.to_bytes() == served.to_bytes()
        bundles = {group.bundle for group in batch.groups}
        for bundle in bundles:
            assert digest_of(await world.client(TRAINER).blob(bundle)) == bundle
        await world.fill(1)
        await offer(world)

    two_days, four_days = 2 * 86_400.0, 4 * 86_400.0
    index = digest_of(state_of(run, 0))
    for age_s, is_state_kept in ((60.0, True), (two_days, True), (four_days, False)):
        again = await folder_parts(run, tmp_path, checkpoints_kept=1)
        async with running(replace(again, clock=WrongClock(age_s))) as world:
            await world.until(partial(_holds, again, bundles, age_s >= two_days, index, is_state_kept))
            assert await again.public.has(digest_of(RECIPE))
            assert (await world.client(TRAINER).public_batch(0, 0)).digest == served.digest


async def _holds(parts: Parts, bundles: set[str], are_gone: bool, index: str, is_state_kept: bool) -> bool:
    gone = [not await parts.public.has(bundle) for bundle in bundles]
    return all(gone) is are_gone and await parts.public.has(index) is is_state_kept


@pytest.mark.parametrize("bytes_max", [6_000, 1])
async def test_what_the_oldest_policies_need_goes_when_all_has_more_bytes_than_promised(bytes_max: int) -> None:
    run = replayable(bytes_max=bytes_max)
    parts = memory_parts(run, checkpoints_kept=1)
    needed: list[set[str]] = []
    sizes: list[int] = []

    async def published(*digests: str) -> None:
        await offer(world)
        needed.append(set(digests))
        part = len(PART) * any(digest_of(state_of(run, len(sizes))) == digest for digest in digests)
        sizes.append(part + sum([await parts.public.size(digest) for digest in digests]))

    async def is_kept_as_promised() -> bool:
        kept = [all([await parts.public.has(digest) for digest in digests]) for digests in needed]
        return kept == [sum(sizes[version:]) <= bytes_max or version >= 6 for version in range(8)]

    async with running(parts) as world:
        await world.client(TRAINER).put_blob(RECIPE)
        await published(digest_of(state_of(run, 0)))
        await world.join(ANNA)
        for step in range(7):  # policies 0, 2, 4 and 6 have a state
            batch = await world.fill(step)
            states = [digest_of(state_of(run, step + 1))] if step % 2 else []
            await published(*{group.bundle for group in batch.groups}, *states)
        await world.until(is_kept_as_promised)
        assert 6_000 < sum(sizes) < 20_000
    again = replace(parts, web=AiohttpServer(), metrics=PrometheusMetrics())
    async with running(again) as world:  # reads first what is left
        await world.status()
        await world.until(is_kept_as_promised)


class CountedDocuments(MemoryDocuments):
    """Documents that count what is read, and of which some cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Counter[str]()
        self.unreadable = ""

    async def read(self, name: str, *, start: int = 0, end: int | None = None) -> bytes:
        self.reads[name] += 1
        if name == self.unreadable:
            raise OSError("the disk cannot read it")
        return await super().read(name, start=start, end=end)


async def _published(run: PinnedRun, steps: int) -> tuple[Parts, set[str]]:
    """Return the parts of a coordinator that published some steps, and the bundles of the first."""
    parts = replace(memory_parts(run), published=CountedDocuments())
    async with running(parts) as world:
        await world.client(TRAINER).put_blob(RECIPE)
        await offer(world)
        await world.join(ANNA)
        batches = []
        for step in range(steps):
            batches.append(await world.fill(step))
            await offer(world)
    return parts, {group.bundle for group in batches[0].groups}


@pytest.mark.parametrize("fault", ["damaged batch", "unreadable batch", "damaged manifest"])
async def test_a_document_that_cannot_be_read_delays_the_deletion_and_ends_no_coordinator(
    fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts, bundles = await _published(replayable(), 2)
    published = parts.published
    assert isinstance(published, CountedDocuments)
    name = batch_name(0, 0) if "batch" in fault else manifest_name(1)
    whole = await published.read(name)
    if "unreadable" in fault:
        published.unreadable = name
    else:
        await published.write(name, whole[:-9])
    late = replace(parts, clock=WrongClock(2 * 86_400.0), web=AiohttpServer(), metrics=PrometheusMetrics())
    async with running(late) as world:

        async def is_said() -> bool:
            return f"next try in an hour: {name}" in caplog.text

        await world.until(is_said)
        await world.status()
        for bundle in bundles:
            assert await parts.public.has(bundle)
    published.unreadable = ""
    await published.write(name, whole)
    later = replace(parts, clock=WrongClock(2 * 86_400.0), web=AiohttpServer(), metrics=PrometheusMetrics())
    async with running(later) as world:
        await world.until(partial(_holds, later, bundles, True, digest_of(state_of(parts.run, 0)), True))


async def test_each_kept_document_is_read_once_however_often_old_parts_are_deleted() -> None:
    published = CountedDocuments()
    parts = replace(memory_parts(replayable(), checkpoints_kept=1), published=published)
    async with running(parts) as world:
        await offer(world)
        await world.join(ANNA)
        for step in range(6):
            await world.fill(step)
            await offer(world)
    reads = {step: published.reads[batch_name(step, 0)] for step in range(5)}
    assert max(reads.values()) <= 1, reads


class SlowBlobs(MemoryBlobs):
    """Blobs that count how many are read at the same time."""

    reading = most = 0

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        self.reading += 1
        self.most = max(self.most, self.reading)
        for _ in range(3):
            await asyncio.sleep(0)
        self.reading -= 1
        return await super().get(digest, start=start, end=end)


async def test_the_bundles_of_a_step_are_copied_at_the_same_time() -> None:
    bundles = SlowBlobs()
    parts = replace(memory_parts(replayable()), bundles=bundles)
    async with running(parts) as world:
        await offer(world)
        await world.join(ANNA)
        for _ in range(2):
            await world.client(ANNA).upload(make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA))
            await world.judge()
        batch = await world.fill(0)
        bundles.most = 0
        await offer(world)
    assert bundles.most == len({group.bundle for group in batch.groups}) == 3


async def test_commitments_that_are_missing_or_not_stored_are_refused() -> None:
    async with running(memory_parts(replayable())) as world:
        with pytest.raises(RemoteError) as absent:
            await offer(world, with_state=False)
        assert absent.value.code is ErrorCode.NOT_FOUND
        for change in ({"training_state": None}, {"numerics": None}, {"lr": 1e-6}):
            with pytest.raises(RemoteError) as broken:
                await offer(world, **change)
            assert broken.value.code is ErrorCode.CHAIN_BROKEN
        await offer(world)


async def test_bundles_stay_private_where_the_run_says_so_and_batches_where_it_promises_nothing() -> None:
    parts = memory_parts(replayable(BundleAccess.AUDITORS))
    async with running(parts) as world:
        await offer(world)
        await world.join(ANNA)
        batch = await world.fill(0)
        await offer(world)
        assert (await world.client(TRAINER).public_batch(0, 0)).digest == world.batch
        assert not await parts.public.has(batch.groups[0].bundle)
    async with running(memory_parts(make_run(async_level=0)), ANNA) as world:
        await world.fill(0)
        await world.publish()
        with pytest.raises(RemoteError, match="is not published"):
            await world.client(TRAINER).public_batch(0, 0)


async def test_anyones_request_for_a_batch_is_answered_without_parsing_it() -> None:
    """To parse the largest one and to write it again took a second, during which the coordinator answered no others."""
    parts = memory_parts(replayable())
    async with running(parts) as world:
        await offer(world)
        await world.join(ANNA)
        await world.fill(0)
        await offer(world)
        stored = await parts.published.read(batch_name(0, 0)) + b"\n"
        await parts.published.write(batch_name(0, 0), stored)
        status, body, headers = await world.get("/v1/batches/0/0")
        assert (status, body, headers["Content-Type"]) == (200, stored, "application/json")
        assert (await world.client(TRAINER).public_batch(0, 0)).digest == world.batch


async def test_a_long_batch_is_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its readers behind a gateway each held a whole one in the coordinator's memory."""
    parts, read = memory_parts(replayable()), list[int]()
    async with running(parts) as world:
        await offer(world)
        await world.join(ANNA)
        await world.fill(0)
        await offer(world)
        stored = (await parts.published.read(batch_name(0, 0))).ljust(2 * documents.BATCH_PIECE_BYTES + 1)
        await parts.published.write(batch_name(0, 0), stored)
        read_part = parts.published.read

        async def noted(name: str, *, start: int = 0, end: int | None = None) -> bytes:
            data = await read_part(name, start=start, end=end)
            if end is not None:  # the coordinator's own tasks read whole documents
                read.append(len(data))
            return data

        monkeypatch.setattr(parts.published, "read", noted)
        status, body, headers = await world.get("/v1/batches/0/0")
        assert (status, body, headers["Content-Length"]) == (200, stored, str(len(stored)))
        assert read == [documents.BATCH_PIECE_BYTES, documents.BATCH_PIECE_BYTES, 1]


async def test_the_trainer_seeds_policies_and_no_training_states(tmp_path: Path) -> None:
    published, parts = BatchCoordinator(make_batch_run()), PartStore(tmp_path / "parts", bytes_max=2**20)
    seeding = Seeding(published, published.run, parts, HaveSet(), folder=tmp_path)
    part = await seeding.put_blob(b"part of a policy")
    state = await seeding.put_blob(b"training state", seeded=False)
    assert published.blobs.keys() >= {part, state}
    assert (parts.size(part), parts.size(state)) == (16, None)


@pytest.mark.parametrize(
    "damaged", [b"[]", b"[1]", b'{"bundles": "x", "states": 0}', b'{"bundles": 1}', b"[" * 100_000]
)
async def test_a_damaged_record_of_what_is_kept_begins_again(damaged: bytes) -> None:
    """Before, a document of another form kept the coordinator from starting."""
    private = MemoryDocuments()
    await private.write("replay.json", damaged)
    async with running(replace(memory_parts(replayable()), private=private)) as world:
        await offer(world)
        assert (await world.status())["head"] == 0
