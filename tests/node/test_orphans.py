"""Stored bytes that nothing refers to are deleted while a coordinator serves, and those in use never are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.node.coordinator_process import WrongClock
from tests.node.coordinator_world import (
    ANNA,
    TRAINER,
    World,
    folder_parts,
    make_parcel,
    make_run,
    memory_parts,
    running,
)
from tests.node.crowd_world import persist
from tests.node.held_store_world import HeldStore

from prime_lab.memory_blobs import MemoryBlobs
from prime_lab.s3_server import BUCKET
from prime_node.coordinator import daemon
from prime_node.coordinator.assembly import PUBLIC_AGE_S
from prime_node.ports.blobs import Blobs
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.requests import BatchRequest

LATER = WrongClock(2 * PUBLIC_AGE_S)
"""Clock by which all that is stored now is old enough to be deleted."""


async def until_deleted(world: World, blobs: Blobs, digest: str) -> None:
    async def is_deleted() -> bool:
        return not await blobs.has(digest)

    await world.until(is_deleted)


@pytest.mark.parametrize("place", ["folder", "s3"])
async def test_bytes_that_nothing_refers_to_are_deleted_while_workers_upload(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Before, only a start did so, and a run of months kept what its gateways had stored for nothing."""
    monkeypatch.setattr(daemon, "SWEEP_S", 0.01)
    settings: dict[str, object] = {"checkpoints_kept": 1}
    if place == "s3":
        request.getfixturevalue("s3")
        settings["blobs"] = f"s3://{BUCKET}/{tmp_path.name}"
    parts = replace(await folder_parts(make_run(groups_per_step=16), tmp_path, **settings), clock=LATER)
    async with running(parts, ANNA) as world:
        bundle, part = await parts.bundles.put(b"a bundle for nothing"), await parts.public.put(b"a part of no policy")
        uploaded = list[str]()
        for number in range(12):
            lease = await world.lease(ANNA, rollouts_max=2)
            uploaded.append((await world.client(ANNA).upload(make_parcel(lease, ANNA))).bundle)
            if number % 2:  # others are still to be judged
                await world.judge()
        await until_deleted(world, parts.bundles, bundle)
        await until_deleted(world, parts.public, part)
        assert [await parts.bundles.has(digest) for digest in uploaded] == [True] * 12
        assert world.head is not None
        assert [await parts.public.has(blob.digest) for blob in world.head.manifest.blobs] == [True, True]


class HeldBlobs(MemoryBlobs):
    """Blobs whose deletions wait for a test."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_delete = asyncio.Event(), asyncio.Event()

    async def delete(self, digest: str) -> None:
        self.is_asked.set()
        await self.may_delete.wait()
        await super().delete(digest)


async def test_an_orphan_that_a_worker_uploads_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is old, as a bucket does not date it again, and was on the list of orphans."""
    monkeypatch.setattr(daemon, "SWEEP_S", 0.01)
    bundles = HeldBlobs()
    parts = replace(memory_parts(make_run()), clock=LATER, bundles=bundles)
    async with running(parts, ANNA) as world:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        for data in (b"the first one", parcel, b"the last one"):  # deleted in this order
            await bundles.put(data)
        await bundles.is_asked.wait()
        assert (await world.client(ANNA).upload(parcel)).verdict is None
        bundles.may_delete.set()
        await until_deleted(world, bundles, digest_of(b"the last one"))
        assert await bundles.has(digest_of(parcel))


async def test_an_upload_of_bytes_that_are_being_deleted_is_refused_until_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon, "SWEEP_S", 0.01)
    bundles = HeldBlobs()
    parts = replace(memory_parts(make_run()), clock=LATER, bundles=bundles)
    async with running(parts, ANNA) as world:
        parcel = make_parcel(await world.lease(ANNA), ANNA)
        await bundles.put(parcel)
        await bundles.is_asked.wait()
        with pytest.raises(RemoteError, match="is being deleted") as refused:
            await world.client(ANNA).upload(parcel)
        assert refused.value.code is ErrorCode.UNAVAILABLE
        bundles.may_delete.set()
        assert (await persist(lambda: world.client(ANNA).upload(parcel))).verdict is None
        await until_deleted(world, bundles, await bundles.put(b"another one"))
        assert await bundles.has(digest_of(parcel))


class ListedBlobs(MemoryBlobs):
    """Blobs that say when all of them were listed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_listed = asyncio.Event()

    async def digests(self, *, before_ms: int | None = None) -> AsyncIterator[str]:
        async for digest in super().digests(before_ms=before_ms):
            yield digest
        self.is_listed.set()


class HeldClock(WrongClock):
    """Clock of a coordinator that deletes no orphans until a test lets it."""

    def __init__(self) -> None:
        super().__init__(2 * PUBLIC_AGE_S)
        self.may_sweep = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        if seconds == daemon.SWEEP_S:
            await self.may_sweep.wait()
        await super().sleep(seconds)


async def test_bundles_that_a_crash_would_bring_back_stay_until_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forgotten by an event that the store has not written."""
    monkeypatch.setattr(daemon, "SWEEP_S", 0.01)
    clock, store, bundles = HeldClock(), HeldStore(), ListedBlobs()
    parts = replace(memory_parts(make_run()), clock=clock, store=store, bundles=bundles)
    async with running(parts, ANNA) as world:
        await world.fill(0)
        trained = [digest async for digest in bundles.digests()]
        assert trained
        await world.publish()
        store.may_write.clear()
        store.is_asked.clear()
        asking = asyncio.create_task(world.client(TRAINER).batch(BatchRequest(step=1, durable_step=1)))
        await store.is_asked.wait()
        bundles.is_listed.clear()
        clock.may_sweep.set()
        await bundles.is_listed.wait()
        are_kept = [await bundles.has(digest) for digest in trained]
        store.may_write.set()
        await asking
        assert all(are_kept)
        for digest in trained:
            await until_deleted(world, bundles, digest)
