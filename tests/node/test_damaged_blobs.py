"""Public blobs and stored bundles whose bytes a disk changed: nothing waits for them, and no worker is convicted by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.node.archive_world import PART, offer, replayable, state_of
from tests.node.batch_coordinator import BatchCoordinator
from tests.node.batch_coordinator import make_run as make_trainers_run
from tests.node.coordinator_world import (
    ANNA,
    TRAINER,
    folder_parts,
    make_manifest,
    make_parcel,
    make_run,
    running,
)
from tests.node.publisher_world import make, publish
from tests.node.rotten_world import be_bad_block, be_bad_sector

from prime_node.coordinator.api.blobs import BLOB_CHUNK_BYTES
from prime_node.ports.transport import Unreachable
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.verdict import RejectReason

Damage = Callable[[Path, pytest.MonkeyPatch], object]


def flip(path: Path, patch: pytest.MonkeyPatch) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def blob_at(folder: Path, digest: str) -> Path:
    return folder / "public" / "blobs" / digest[:2] / digest


async def test_a_blob_that_the_disk_cannot_read_is_one_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was that the coordinator is busy: a trainer that needed it to start waited without end."""
    async with running(await folder_parts(make_run(), tmp_path)) as world:
        head = await world.publish()
        part = head.manifest.encodings[0].parts[0].digest
        be_bad_sector(monkeypatch, blob_at(tmp_path, part))
        with pytest.raises(RemoteError, match="damaged") as caught:
            await world.client(TRAINER).blob(part)
        assert caught.value.code is ErrorCode.NOT_FOUND


async def test_a_bad_sector_far_into_a_blob_is_the_answer_to_the_second_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer had begun, so its connection broke; a trainer that needed the blob asked for it without end."""
    async with running(await folder_parts(make_run(), tmp_path)) as world:
        blob = np.random.default_rng(1).bytes(3 * BLOB_CHUNK_BYTES)
        digest, trainer = await world.parts.public.put(blob), world.client(TRAINER)
        with monkeypatch.context() as patch:
            be_bad_block(patch, blob_at(tmp_path, digest), 2 * BLOB_CHUNK_BYTES + 5)
            with pytest.raises(Unreachable):
                await trainer.blob(digest)
            for _ in range(2):
                with pytest.raises(RemoteError, match="damaged") as caught:
                    await trainer.blob(digest)
                assert caught.value.code is ErrorCode.NOT_FOUND
            assert await trainer.blob(digest, end=2 * BLOB_CHUNK_BYTES) == blob[: 2 * BLOB_CHUNK_BYTES]
        assert digest in caplog.text
        assert "Traceback" not in caplog.text
        assert await trainer.blob(digest) == blob, "the disk can read it again"


@pytest.mark.parametrize("damage", [flip, lambda path, patch: be_bad_sector(patch, path)], ids=["bit", "sector"])
async def test_an_index_that_is_damaged_before_its_manifest_comes_is_uploaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    """The manifest was refused each time: the trainer ended at each start, or waited without end."""
    async with running(await folder_parts(make_run(), tmp_path)) as world:
        signed, blobs = make_manifest(world.run, None)
        trainer = world.client(TRAINER)
        for blob in blobs:
            await trainer.put_blob(blob)
        with monkeypatch.context() as patch:
            damage(blob_at(tmp_path, signed.manifest.encodings[0].index.digest), patch)
            with pytest.raises(RemoteError) as caught:
                await trainer.publish(signed.envelope)
        assert caught.value.code is ErrorCode.NOT_FOUND
        for blob in blobs:
            await trainer.put_blob(blob)
        await trainer.publish(signed.envelope)


@pytest.mark.parametrize("damage", [flip, lambda path, patch: be_bad_sector(patch, path)], ids=["bit", "sector"])
async def test_a_training_state_that_is_damaged_before_its_manifest_comes_is_uploaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage
) -> None:
    """The answer was that the coordinator is busy, or that the trainer had sent other bytes."""
    run = replayable()
    async with running(await folder_parts(run, tmp_path)) as world:
        for blob in (PART, index := state_of(run, 0)):
            await world.client(TRAINER).put_blob(blob)
        with monkeypatch.context() as patch:
            damage(blob_at(tmp_path, digest_of(index)), patch)
            with pytest.raises(RemoteError) as caught:
                await offer(world, with_state=False)
        assert caught.value.code is ErrorCode.NOT_FOUND
        await offer(world)


async def test_a_trainer_starts_without_a_part_of_policy_0_that_never_arrives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = BatchCoordinator(make_trainers_run(max_steps=20))
    await publish(coordinator, range(2))

    async def blob(digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        raise Unreachable("the connection broke in the middle of an answer")

    monkeypatch.setattr(coordinator, "blob", blob)
    publisher = make(coordinator)
    await publisher.start()
    assert publisher.head == 1
    await publisher.close()


def in_other_json(parcel: bytes) -> bytes:
    """Return a parcel whose signed header has spaces between its members, as anyone can write it."""
    length = int.from_bytes(parcel[4:8], "big")
    envelope = json.dumps(json.loads(parcel[8 : 8 + length])).encode()
    return parcel[:4] + len(envelope).to_bytes(4, "big") + envelope + parcel[8 + length :]


async def test_a_header_that_rotted_on_the_coordinators_disk_convicts_no_worker(tmp_path: Path) -> None:
    """Anyone who has recorded an upload can send its header again. It was compared with the rotten one."""
    async with running(await folder_parts(make_run(), tmp_path), ANNA) as world:
        parcel = make_parcel(await world.lease(ANNA, rollouts_max=2), ANNA)
        bundle = (await world.client(ANNA).upload(parcel)).bundle
        stored = bytearray(parcel)
        place = next(place for place in range(60, len(stored)) if chr(stored[place]).isalpha())
        stored[place] ^= 0x20  # one bit: the case of a letter in the base64 of the header
        (tmp_path / "bundles" / bundle[:2] / bundle).write_bytes(stored)
        reply = await world.client(ANNA).upload(in_other_json(parcel))
        assert reply.verdict is not None
        assert reply.verdict.reason is RejectReason.DUPLICATE
