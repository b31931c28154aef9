"""One suite for all blobs and documents: what ports/blobs.py and ports/documents.py promise."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prime_lab.memory_blobs import MemoryBlobs, MemoryDocuments
from prime_node.adapters.storage.folder_blobs import FolderBlobs, FolderDocuments
from prime_node.ports.blobs import Blobs
from prime_node.ports.documents import Documents
from prime_protocol.digest import digest_of

DATA = bytes(range(256)) * 10


@pytest.fixture(params=["memory", "folder"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return MemoryBlobs() if request.param == "memory" else FolderBlobs(tmp_path)


@pytest.fixture(params=["memory", "folder"])
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> Documents:
    return MemoryDocuments() if request.param == "memory" else FolderDocuments(tmp_path)


async def test_a_blob_comes_back_under_its_digest(blobs: Blobs) -> None:
    digest = await blobs.put(DATA)
    assert digest == digest_of(DATA)
    assert await blobs.get(digest) == DATA
    assert await blobs.size(digest) == len(DATA)
    assert await blobs.has(digest)
    assert await blobs.put(DATA) == digest, "putting is idempotent"
    other = DATA[1:]
    assert await blobs.put(other, digest=digest_of(other)) == digest_of(other)
    assert await blobs.get(digest_of(other)) == other


@pytest.mark.parametrize(("start", "end"), [(0, 10), (5, None), (5, 5), (len(DATA) - 1, None), (2_000, 9_000)])
async def test_a_range_is_what_a_slice_is(blobs: Blobs, start: int, end: int | None) -> None:
    assert await blobs.get(await blobs.put(DATA), start=start, end=end) == DATA[start:end]


async def test_an_empty_blob_is_a_blob(blobs: Blobs) -> None:
    digest = await blobs.put(b"")
    assert await blobs.get(digest) == b""
    assert await blobs.size(digest) == 0


@pytest.mark.parametrize("digest", ["0" * 64, "", "../../etc/passwd", "A" * 64, "..", "0" * 63 + "\0"])
async def test_what_is_not_there_is_a_key_error(blobs: Blobs, digest: str) -> None:
    await blobs.put(DATA)
    assert not await blobs.has(digest)
    with pytest.raises(KeyError):
        await blobs.get(digest)
    with pytest.raises(KeyError):
        await blobs.size(digest)


async def test_a_deleted_blob_is_missing_and_can_be_stored_again(blobs: Blobs) -> None:
    digest = await blobs.put(DATA)
    await blobs.delete(digest)
    await blobs.delete(digest)
    assert not await blobs.has(digest)
    assert await blobs.put(DATA) == digest
    assert await blobs.get(digest) == DATA


async def test_all_digests_are_listed(blobs: Blobs) -> None:
    put = {await blobs.put(bytes([number])) for number in range(20)}
    assert {digest async for digest in blobs.digests()} == put


async def test_many_writers_of_the_same_blob_do_not_disturb_one_another(blobs: Blobs) -> None:
    digests = await asyncio.gather(*(blobs.put(DATA) for _ in range(20)))
    assert set(digests) == {digest_of(DATA)}
    assert await blobs.get(digests[0]) == DATA


async def test_a_document_is_replaced_as_a_whole(documents: Documents) -> None:
    with pytest.raises(KeyError):
        await documents.read("manifests/00000000.json")
    await documents.write("manifests/00000000.json", b"one")
    await documents.write("manifests/00000000.json", b"2")
    assert await documents.read("manifests/00000000.json") == b"2"


async def test_a_part_of_a_document_is_read(documents: Documents) -> None:
    with pytest.raises(KeyError):
        await documents.size("one")
    await documents.write("one", DATA)
    assert await documents.size("one") == len(DATA)
    assert await documents.read("one", start=3, end=7) == DATA[3:7]
    assert await documents.read("one", start=3) == DATA[3:]


async def test_a_half_written_file_of_a_crash_is_no_blob_and_is_cleared_away(tmp_path: Path) -> None:
    await FolderBlobs(tmp_path).put(DATA)
    (tmp_path / ".partial" / "half").write_bytes(b"half")
    reopened = FolderBlobs(tmp_path)
    assert [digest async for digest in reopened.digests()] == [digest_of(DATA)]
    assert list((tmp_path / ".partial").iterdir()) == []


async def test_a_folder_has_the_layout_that_mirrors_and_verifiers_read(tmp_path: Path) -> None:
    digest = await FolderBlobs(tmp_path).put(DATA)
    assert (tmp_path / digest[:2] / digest).read_bytes() == DATA
