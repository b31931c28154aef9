"""Downloaded data is kept: after a cut, a restart or disk damage only the damaged data is fetched again."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node.table_engine import table_weights
from tests.node.worker_world import MemorySource, following, make_follower, make_run, settle
from tests.time_world import until

from prime_node.broadcast.follow.follower import DownloadProgress
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.ports.transport import Unreachable
from prime_protocol.digest import digest_of
from prime_protocol.manifest import PartEntry
from prime_protocol.weights import WeightTensor, root_of

RUN = make_run()


async def test_an_interrupted_download_does_not_start_at_zero(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    weights = {f"layer{number}": table_weights(number)["table"] for number in range(6)}
    signed = source.publish(weights, part_bytes=1)
    [encoding] = signed.manifest.encodings
    assert len(encoding.parts) == 6

    def cut_after_three(_: str) -> None:
        if len(source.blobs_asked) >= 3:
            raise Unreachable("the line is cut")

    source.before_blob = cut_after_three
    async with following(make_follower(tmp_path, source)):
        await until(lambda: len(source.blobs_asked) == 3)
        await settle(source)
    assert len(source.blobs_asked) == 3
    source.before_blob = lambda _: None
    seen: list[DownloadProgress] = []
    async with following(make_follower(tmp_path, source, on_progress=seen.append)) as follower:
        await follower.wait_newer(-1)
    assert sorted(source.blobs_asked) == sorted(blob.digest for blob in encoding.blobs)
    assert seen[0] == DownloadProgress(0, 0, encoding.sent_bytes)
    assert seen[-1].bytes_done == encoding.sent_bytes


def many_chunks(monkeypatch: pytest.MonkeyPatch) -> dict[str, WeightTensor]:
    """Weights of six chunks in one part, every chunk a separate piece."""
    monkeypatch.setattr("prime_protocol.pieces.PIECE_BYTES_MIN", 1)
    return {f"layer{number}": table_weights(number)["table"] for number in range(6)}


async def test_a_part_is_fetched_in_pieces_and_a_cut_costs_those_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = many_chunks(monkeypatch)
    source = MemorySource(RUN)
    assert len(source.publish(weights).manifest.encodings[0].parts) == 1
    cuts = iter([False, True, False, True] + [False] * 100)

    def cut(_: str) -> None:
        if next(cuts):
            raise Unreachable("cut")

    source.before_blob = cut
    async with following(make_follower(tmp_path, source)) as follower:
        await follower.wait_newer(-1)
    assert len(source.blobs_asked) == 1 + 6  # the index is one more


async def test_what_one_source_gave_before_it_was_cut_is_kept_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = many_chunks(monkeypatch)
    first, empty, second = MemorySource(RUN), MemorySource(RUN), MemorySource(RUN)
    for source in (first, empty, second):
        source.publish(weights)
    empty.blobs.clear()

    def cut_after_two(_: str) -> None:
        if len(first.blobs_asked) == 2:
            raise Unreachable("cut")

    first.before_blob = cut_after_two
    async with following(make_follower(tmp_path, first, empty, second)) as follower:
        assert root_of((await follower.wait_newer(-1)).weights) == root_of(weights)
    assert len(first.blobs_asked) + len(second.blobs_asked) == 1 + 6


async def test_pieces_on_the_disk_are_hashed_again_and_kept_where_they_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = many_chunks(monkeypatch)
    source = MemorySource(RUN)
    [encoding] = source.publish(weights).manifest.encodings

    def cut_after_five(_: str) -> None:
        if len(source.blobs_asked) >= 5:
            raise Unreachable("the line is cut")

    source.before_blob = cut_after_five
    path = tmp_path / "parts" / f"{encoding.parts[0].digest}.partial"

    def here() -> list[int]:
        data = path.read_bytes()
        ends = [number * len(data) // 6 for number in range(7)]
        return [number for number in range(6) if any(data[ends[number] + 100 : ends[number + 1] - 100])]

    async with following(make_follower(tmp_path, source)):
        await until(lambda: len(source.blobs_asked) == 5)
        await settle(source)
        await until(lambda: len(here()) == 4)  # a thread of its own stores them
    assert len(source.blobs_asked) == 5
    data = bytearray(path.read_bytes())
    data[here()[0] * len(data) // 6 + 200] ^= 1
    path.write_bytes(data)
    source.before_blob = lambda _: None
    async with following(make_follower(tmp_path, source)) as follower:
        assert root_of((await follower.wait_newer(-1)).weights) == root_of(weights)
    assert len(source.blobs_asked) == 5 + 3


async def test_a_damaged_part_on_the_disk_is_fetched_again(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    source.publish(table_weights(0))
    async with following(make_follower(tmp_path, source)) as follower:
        await follower.wait_newer(-1)
    path = tmp_path / "parts" / source.signed(0).manifest.encodings[0].parts[0].digest
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    async with following(make_follower(tmp_path, source)) as follower:
        assert root_of((await follower.wait_newer(-1)).weights) == root_of(table_weights(0))
    assert len(source.blobs_asked) == 3


async def test_parts_of_dropped_policies_are_removed_from_the_disk(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    async with following(make_follower(tmp_path, source)) as follower:
        for version in range(6):
            source.publish(table_weights(version))
            await follower.wait_newer(version - 1)
        await settle(source)
        kept = {path.name for path in (tmp_path / "parts").iterdir()}
    assert kept == {blob.digest for version in (4, 5) for blob in source.signed(version).manifest.blobs}


def test_the_part_store_is_bounded(tmp_path: Path) -> None:
    store = PartStore(tmp_path, bytes_max=10)
    first, second = b"12345678", b"abcdefgh"
    assert store.write(digest_of(first), first)
    assert not store.write(digest_of(second), second)
    assert store.read(PartEntry(digest=digest_of(second), size=8)) is None
    assert store.read(PartEntry(digest=digest_of(first), size=8)) == first
