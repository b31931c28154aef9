"""A download ends with its error, even if that is its last event, and leaves no running task."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import cast

import pytest
from tests.node.swarm_world import policy_weights
from tests.time_world import VirtualClock, turns, until

from prime_node.adapters.system_clock import SystemClock
from prime_node.broadcast.swarm import download as download_module
from prime_node.broadcast.swarm import piece_decoder, sources
from prime_node.broadcast.swarm.download import Download, Downloads
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.sources import NamedSource, SourceKind, SourcePool
from prime_node.ports.clock import Clock
from prime_node.ports.transport import CheckpointSource, Unreachable
from prime_protocol.checkpoint import encode_checkpoint, tensor_table
from prime_protocol.chunk_index import open_index
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import PartEntry


class Origin:
    """Source of the only part of a checkpoint."""

    def __init__(self, part: bytes) -> None:
        self._part = part

    async def blob(self, digest: str, *, start: int, end: int) -> bytes:
        return self._part[start:end]


def one_piece(
    folder: Path, decode: Callable[[range, bytes | memoryview], None], *, clock: Clock | None = None, **entry: object
) -> tuple[Download, SourcePool]:
    """A download of a part that is a single piece, and its pool. `entry` replaces fields of the part's entry."""
    weights = policy_weights(0)
    made = encode_checkpoint(weights)
    assert len(made.parts) == 1
    clock, rng = clock or SystemClock(), random.Random(0)
    pool = SourcePool([("origin", cast("CheckpointSource", Origin(made.parts[0])))], clock=clock, rng=rng)
    index = open_index(made.index, made.encoding, tensor_table(weights))
    parts = PartStore(folder, bytes_max=2**30)
    encoding = made.encoding.model_copy(update={"parts": (made.encoding.parts[0].model_copy(update=entry),)})
    return Download(Downloads(pool, parts, HaveSet(), clock, rng, 2**30), encoding, index, decode), pool


async def test_a_last_piece_that_does_not_decode_ends_its_download_with_that(tmp_path: Path) -> None:
    def broken(chunks: range, data: bytes | memoryview) -> None:
        raise RemoteError(ErrorCode.MALFORMED, "no chunk")

    with pytest.raises(RemoteError, match="no chunk"):
        await one_piece(tmp_path, broken)[0].run()


async def test_a_part_of_another_digest_ends_its_download_though_it_was_the_last_one(tmp_path: Path) -> None:
    download, _ = one_piece(tmp_path, lambda chunks, data: None, digest="0" * 64)
    with pytest.raises(RemoteError, match="published with another digest"):
        await download.run()


async def test_a_piece_that_the_disk_changed_is_fetched_again_and_the_publisher_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[range] = []
    download, _ = one_piece(tmp_path, lambda chunks, data: decoded.append(chunks))
    kept = PartStore.put

    def rotten(store: PartStore, digest: str, start: int, data: bytes) -> None:
        kept(store, digest, start, bytes(len(data)))

    monkeypatch.setattr(PartStore, "put", rotten)
    with pytest.raises(Unreachable, match="on this disk is not what arrived"):
        await download.run()
    monkeypatch.setattr(PartStore, "put", kept)
    decoded.clear()
    await one_piece(tmp_path, lambda chunks, data: decoded.append(chunks))[0].run()
    assert decoded


async def test_a_source_whose_piece_arrives_after_its_rest_is_asked_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the piece made it a source that has nothing: it was asked no more, and the only one ended the download."""
    monkeypatch.setattr(download_module, "TICK_S", 1_000.0)
    clock, held = VirtualClock(), list[asyncio.Future[None]]()
    download, pool = one_piece(tmp_path, lambda chunks, data: None, clock=clock)
    (origin,) = pool.lasting
    given, are_held = origin.source.blob, True

    async def blob(digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        if are_held:
            held.append(asyncio.get_running_loop().create_future())
            await held[-1]
        return await given(digest, start=start, end=end)

    monkeypatch.setattr(origin.source, "blob", blob)
    task = asyncio.create_task(download.run())
    await until(lambda: len(held) > 1)
    are_held = False
    held[0].set_exception(Unreachable("cut"))
    await until(lambda: origin.failures)
    await turns()
    clock.seconds += 10.0
    for waiting in held[1:]:
        waiting.set_result(None)
    await asyncio.wait_for(task, 20.0)


async def test_a_download_that_is_cancelled_decodes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, free, busy = [], Event(), asyncio.Event()
    with ThreadPoolExecutor(1) as decoders:
        monkeypatch.setattr(piece_decoder, "DECODERS", decoders)
        decoders.submit(free.wait)
        download, pool = one_piece(tmp_path, lambda chunks, data: decoded.append(chunks))
        origin = pool.lasting[0].source
        given = origin.blob

        async def blob(digest: str, *, start: int = 0, end: int | None = None) -> bytes:
            asyncio.get_running_loop().call_soon(busy.set)
            return await given(digest, start=start, end=end)

        monkeypatch.setattr(origin, "blob", blob)
        task = asyncio.create_task(download.run())
        await busy.wait()
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        free.set()
    assert decoded == []


class Dripping(Origin):
    """Source that announces everything and delivers nothing."""

    async def blob(self, digest: str, *, start: int, end: int) -> bytes:
        await asyncio.get_running_loop().create_future()
        raise AssertionError


async def test_a_peer_that_announces_a_blob_and_withholds_it_delays_no_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sources, "BLOB_S_MAX", 0.01)
    blob = b"index"
    entry = PartEntry(digest=digest_of(blob), size=len(blob))
    origin = cast("CheckpointSource", Origin(blob))
    pool = SourcePool([("origin", origin)], clock=SystemClock(), rng=random.Random(0))
    peer = NamedSource("peer", cast("CheckpointSource", Dripping(blob)), SourceKind.PEER, has={entry.digest: 1})
    pool.add(peer)
    assert await asyncio.wait_for(pool.fetch_blob(entry), 5.0) == blob
    assert peer.failures == 1
