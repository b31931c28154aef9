"""One suite for all blobs and documents: what ports/blobs.py and ports/documents.py promise."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store
from tests.raw_server_world import raw_server
from tests.time_world import VirtualClock

from prime_lab.memory_blobs import MemoryBlobs, MemoryDocuments
from prime_lab.s3_server import BUCKET, S3Server, s3_server
from prime_node.adapters.storage.folder_blobs import FolderBlobs, FolderDocuments
from prime_node.adapters.storage.s3_blobs import open_s3
from prime_node.coordinator.scrubbing import scrub_once
from prime_node.ports.blobs import Blobs, DamagedBlob
from prime_node.ports.documents import Documents
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError, TransientFault

DATA = bytes(range(256)) * 10


RUN, OTHER_RUN = "ab" * 32, "cd" * 32
BYTES_MAX = 2**16


@pytest.fixture(params=["memory", "folder", "s3"])
async def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    match request.param:
        case "memory":
            return MemoryBlobs()
        case "folder":
            return FolderBlobs(tmp_path)
        case _:
            request.getfixturevalue("s3")
            return await open_s3(f"s3://{BUCKET}/{tmp_path.name}", "bundles", run=RUN, bytes_max=BYTES_MAX)


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


@pytest.mark.parametrize("damage", [b"", DATA[:-1], DATA[:-1] + b"x"])
async def test_a_damaged_blob_is_healed_when_it_is_put_again(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    blobs = FolderBlobs(tmp_path)
    digest = await blobs.put(DATA)
    path = tmp_path / digest[:2] / digest
    path.write_bytes(damage)
    await blobs.put(DATA)
    assert await blobs.get(digest) == DATA
    assert f"{path} was damaged and is written again" in caplog.text


async def test_damaged_blobs_are_found_in_the_background_and_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blobs, clock = FolderBlobs(tmp_path), VirtualClock()
    digests = [await blobs.put(bytes([number]) * 100) for number in range(5)]
    (tmp_path / digests[1][:2] / digests[1]).write_bytes(b"rot")
    assert await scrub_once(blobs, clock) == 1
    assert digests[1] in caplog.text
    assert [await blobs.has(digest) for digest in digests] == [True, False, True, True, True]
    assert await scrub_once(blobs, clock) == 0


class FaultyBlobs(MemoryBlobs):
    """Blobs on a disk with faults that pass: `answers` come before the stored bytes, an error or other bytes."""

    def __init__(self, *answers: OSError | bytes, delete_error: OSError | None = None) -> None:
        super().__init__()
        self._answers, self._delete_error = list(answers), delete_error

    async def get(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        """Return a faulty answer, if one is left."""
        match self._answers.pop(0) if self._answers else None:
            case None:
                return await super().get(digest, start=start, end=end)
            case bytes() as data:
                return data
            case error:
                raise error

    async def delete(self, digest: str) -> None:
        """Delete a blob, unless the disk can only be read."""
        if self._delete_error is not None:
            raise self._delete_error
        await super().delete(digest)


async def test_a_fault_of_the_disk_that_passes_deletes_no_blob(caplog: pytest.LogCaptureFixture) -> None:
    fault, rot = DamagedBlob(errno.EIO, "a bad sector or a lost cable"), bytes(100)
    readonly = OSError(errno.EROFS, "read-only file system")
    for blobs, damaged, warnings in (
        (FaultyBlobs(fault, fault, fault), 0, 1),
        (FaultyBlobs(rot), 0, 0),
        (FaultyBlobs(rot, fault), 0, 1),
        (FaultyBlobs(rot, rot, delete_error=readonly), 1, 1),
    ):
        digests = [await blobs.put(bytes([number]) * 100) for number in range(1, 5)]
        caplog.clear()
        assert await scrub_once(blobs, VirtualClock()) == damaged
        assert [await blobs.has(digest) for digest in digests] == [True] * 4
        assert sum(record.levelname == "WARNING" for record in caplog.records) == warnings, caplog.text


@pytest.mark.parametrize(
    ("start", "end"),
    [(0, 10), (5, None), (5, 5), (len(DATA) - 1, None), (2_000, 9_000), (len(DATA), None), (9_000, 9_999)],
)
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


async def test_only_blobs_that_were_stored_before_a_time_are_listed(blobs: Blobs) -> None:
    digest = await blobs.put(DATA)
    now_ms = round(1_000 * time.time())
    assert [found async for found in blobs.digests(before_ms=now_ms - 60_000)] == []
    assert [found async for found in blobs.digests(before_ms=now_ms + 60_000)] == [digest]


async def test_a_blob_that_is_stored_again_is_young_again(tmp_path: Path) -> None:
    blobs = FolderBlobs(tmp_path)
    digest = await blobs.put(DATA)
    os.utime(tmp_path / digest[:2] / digest, (1.0, 1.0))
    assert [found async for found in blobs.digests(before_ms=2_000)] == [digest]
    await blobs.put(DATA)
    assert [found async for found in blobs.digests(before_ms=2_000)] == []


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
    os.utime(tmp_path / ".partial" / "half", (1.0, 1.0))
    (tmp_path / ".partial" / "present").write_bytes(b"another process writes it now")
    reopened = FolderBlobs(tmp_path)
    assert [digest async for digest in reopened.digests()] == [digest_of(DATA)]
    assert [path.name for path in (tmp_path / ".partial").iterdir()] == ["present"]


async def test_a_folder_has_the_layout_that_mirrors_and_verifiers_read(tmp_path: Path) -> None:
    digest = await FolderBlobs(tmp_path).put(DATA)
    assert (tmp_path / digest[:2] / digest).read_bytes() == DATA


async def test_runs_and_folders_of_one_bucket_do_not_see_each_other(s3: S3Server, tmp_path: Path) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}/"
    mine, public, other = [
        await open_s3(url, folder, run=run, bytes_max=BYTES_MAX)
        for folder, run in (("bundles", RUN), ("public", RUN), ("bundles", OTHER_RUN))
    ]
    digest = await mine.put(DATA)
    for one in (public, other):
        assert not await one.has(digest)
        assert [found async for found in one.digests()] == []


async def test_other_bytes_under_a_digest_are_not_served_and_are_replaced(
    s3: S3Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blobs = await open_s3(f"s3://{BUCKET}/{tmp_path.name}", "bundles", run=RUN, bytes_max=BYTES_MAX)
    digest = digest_of(DATA)
    await blobs.put(b"other", digest=digest)
    with pytest.raises(DamagedBlob, match="holds other bytes under this digest"):
        await blobs.get(digest)
    assert await blobs.put(DATA, digest=digest) == digest
    assert await blobs.get(digest) == DATA, "what was acknowledged is there"
    assert "held other bytes" in caplog.text


async def test_an_object_that_is_larger_than_any_blob_is_not_read_and_can_be_replaced(
    s3: S3Server, tmp_path: Path
) -> None:
    blobs = await open_s3(f"s3://{BUCKET}/{tmp_path.name}", "bundles", run=RUN, bytes_max=len(DATA))
    digest = await blobs.put(DATA)
    store = S3Store(BUCKET, prefix=f"{tmp_path.name}/{RUN[:16]}/bundles", client_options={"allow_http": True})
    await obstore.put_async(store, f"{digest[:2]}/{digest}", DATA + b"more")
    for asked in (blobs.get(digest), blobs.get(digest, start=1), blobs.size(digest)):
        with pytest.raises(DamagedBlob, match=r"holds more than 2,560 bytes"):
            await asked
    assert await blobs.get(digest, start=1, end=9) == DATA[1:9]
    assert not await blobs.has(digest)
    await blobs.put(DATA)
    assert await blobs.get(digest) == DATA


async def _endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer one request as a service that says little and sends without end."""
    request = await reader.readuntil(b"\r\n\r\n")
    is_range = b"\r\nrange:" in request.lower()
    head = "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-9/10" if is_range else "HTTP/1.1 200 OK"
    listed = b"<ListBucketResult></ListBucketResult>" if b"list-type" in request else b""
    described = 'ETag: "1"\r\nLast-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\nConnection: close'
    writer.write(f"{head}\r\n{described}\r\nContent-Length: {len(listed) or 2**40}\r\n\r\n".encode() + listed)
    while not listed:
        writer.write(bytes(BYTES_MAX))
        await writer.drain()


@pytest.mark.parametrize("end", [None, 10])
async def test_a_service_that_sends_without_end_is_not_listened_to(
    monkeypatch: pytest.MonkeyPatch, end: int | None
) -> None:
    async with raw_server(_endless) as port:
        for name, value in S3Server(port).environment.items():
            monkeypatch.setenv(name, value)
        blobs = await open_s3(f"s3://{BUCKET}/x", "bundles", run=RUN, bytes_max=BYTES_MAX)
        with pytest.raises(DamagedBlob, match="holds more than"):
            await blobs.get("0" * 64, end=end)


@pytest.mark.parametrize(
    ("change", "bucket", "message"),
    [
        ({}, "no-such-bucket", r"s3://no-such-bucket cannot be used \(NoSuchBucket\): make the bucket"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, BUCKET, r"\(SignatureDoesNotMatch\): correct AWS_SECRET_ACCESS_KEY"),
        ({"AWS_ACCESS_KEY_ID": "nobody"}, BUCKET, r"\(InvalidAccessKeyId\): correct AWS_ACCESS_KEY_ID"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, BUCKET, "cannot be used .*: check AWS_ENDPOINT_URL"),
    ],
)
async def test_a_bucket_that_cannot_be_used_is_one_line(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], bucket: str, message: str
) -> None:
    for name, value in change.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LocalError, match=message) as found:
        await open_s3(f"s3://{bucket}/x", "bundles", run=RUN, bytes_max=BYTES_MAX)
    assert "\n" not in str(found.value)
    assert isinstance(found.value, TransientFault) == ("AWS_ENDPOINT_URL" in change)


@pytest.mark.slow
async def test_a_service_that_fails_is_an_error_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        blobs = await open_s3(f"s3://{BUCKET}/x", "bundles", run=RUN, bytes_max=BYTES_MAX)
        digest = await blobs.put(DATA)
    for asked in (blobs.get(digest), blobs.size(digest), blobs.put(DATA[1:]), blobs.delete(digest)):
        with pytest.raises(OSError, match=rf"cannot (read|write) in s3://{BUCKET}/x/{RUN[:16]}/bundles: ") as found:
            await asked
        assert found.value.errno == errno.EHOSTUNREACH
