"""A source that stalls, or sends its answers too slowly, delays no machine that has an honest source."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import pytest
from tests.node.table_engine import table_weights
from tests.node.worker_world import MODEL_FILES, MemorySource, following, make_follower, make_run
from tests.raw_server_world import raw_server
from tests.time_world import VirtualClock, until

from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.http_peer import HttpPeer
from prime_node.broadcast.follow import heads, pinned, trust
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import Trust
from prime_node.broadcast.swarm import sources
from prime_node.broadcast.swarm.sources import NamedSource, SourceKind, SourcePool
from prime_protocol.digest import digest_of
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.manifest import PartEntry

HUGE = 10**6


async def never() -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError("nothing sets this event")


class Stalled(MemorySource):
    """A source that takes every request and answers only those in `answered`."""

    def __init__(self, *answered: str, run: MemorySource | None = None) -> None:
        super().__init__(make_run() if run is None else run.run)
        self.answered = answered
        if run is not None:
            self.manifests, self.blobs, self.shown_head = run.manifests, run.blobs, run.shown_head

    async def _take(self, name: str) -> None:
        self.num_asked += 1
        if name not in self.answered:
            await never()

    async def run_spec(self) -> Envelope:
        await self._take("run_spec")
        return await super().run_spec()

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        await self._take("head")
        return await super().head(wait_s=wait_s)

    async def manifest(self, policy_version: int) -> Envelope:
        await self._take("manifest")
        return await super().manifest(policy_version)

    async def timestamp(self) -> Envelope:
        await self._take("timestamp")
        return await super().timestamp()

    async def key_ring(self, version: int) -> Envelope:
        await self._take("key_ring")
        return await super().key_ring(version)

    async def calibration(self, version: int) -> Envelope:
        await self._take("calibration")
        return await super().calibration(version)

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        await self._take("blob")
        return await super().blob(digest, start=start, end=end)


def publishing(num_policies: int) -> MemorySource:
    source = MemorySource(make_run())
    for version in range(num_policies):
        source.publish(table_weights(version))
    return source


@contextlib.asynccontextmanager
async def dripping() -> AsyncIterator[tuple[str, list[str]]]:
    """Begin an answer of a megabyte to each HTTP request, and never end it; yield the URL and the requested paths."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b" ")[1].decode())
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1048576\r\n\r\n ")
        await writer.drain()
        await reader.read()  # until the client gives up

    async with raw_server(serve) as port:
        yield f"http://127.0.0.1:{port}", asked


async def test_a_peer_that_sends_its_head_slowly_delays_no_policy_of_an_honest_source(tmp_path: Path) -> None:
    origin, clock, run = publishing(1), SystemClock(), make_run()
    follower = make_follower(tmp_path, origin, clock=clock, poll_s=0.05)
    async with dripping() as (url, asked), following(follower):
        await follower.wait_newer(-1)
        peer = HttpPeer(url, run=run.digest, clock=clock, bounds=run.spec.limits, authorization=lambda: None)
        follower.pool.add(NamedSource("liar", peer, SourceKind.PEER, head=HUGE))
        await until(lambda: "/v1/head" in asked)
        for version in range(1, 4):
            origin.publish(table_weights(version))
            async with asyncio.timeout(3):
                await follower.wait_newer(version - 1)
        assert follower.pool.peers[0].rests_until_s == 0.0, "its first answer is still under way"
        await peer.close()


class Holding(MemorySource):
    """A coordinator that holds a request for its head as long as it may."""

    def __init__(self) -> None:
        super().__init__(make_run())
        self.waits: list[float] = []
        self.num_cancelled = 0

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        self.waits.append(wait_s)
        try:
            return await never()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise


async def test_a_peers_head_is_asked_for_while_the_coordinator_holds_its_request(tmp_path: Path) -> None:
    """Before, the hint cancelled the request, and with it the connection, and the next one cost two round trips."""
    holding = Holding()
    follower = make_follower(tmp_path, holding)
    looking = asyncio.create_task(follower.heads.look(wait_s=10.0))
    await until(lambda: holding.waits)
    follower.pool.add(NamedSource("peer", publishing(1), SourceKind.PEER, head=0))
    async with asyncio.timeout(5):
        await looking
        await follower.heads.look(wait_s=10.0)
    assert follower.heads.newest == 0
    assert (holding.waits, holding.num_cancelled) == ([10.0], 0)
    follower.heads.close()


async def test_the_newest_announced_head_is_followed_although_a_peer_that_has_it_too_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "FIRST_GRACE_S", 1_000.0)
    follower = make_follower(tmp_path)
    for name, source in (("slow", Stalled()), ("quick", publishing(1))):
        follower.pool.add(NamedSource(name, source, SourceKind.PEER, head=0))
    async with asyncio.timeout(5):
        await follower.heads.look()
    assert follower.heads.newest == 0
    follower.heads.close()


@pytest.mark.parametrize("kind", [SourceKind.PEER, SourceKind.MIRROR])
async def test_a_source_without_an_answer_in_time_has_failed_and_is_asked_less_and_less(
    tmp_path: Path, kind: SourceKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "ANSWER_S_MAX", 0.01)
    origin, rests_s = publishing(1), []
    follower = make_follower(tmp_path, origin)
    named = NamedSource("liar", Stalled(), kind, head=HUGE)
    follower.pool.add(named)
    for _ in range(4):
        await follower.heads.look()
        rests_s.append(named.rests_until_s - origin.clock.monotonic_s())
        await origin.clock.sleep(sources.REST_S_MAX)
    assert named.failures >= 4
    assert rests_s[3] > 3 * rests_s[0] > 0
    assert follower.heads.newest == 0


class Late(MemorySource):
    """A peer that says after `wait_s` that it has no free slot."""

    def __init__(self, clock: VirtualClock, wait_s: float) -> None:
        super().__init__(make_run())
        self.clock = clock
        self.wait_s = wait_s

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        await self.clock.sleep(self.wait_s)
        raise RemoteError(ErrorCode.UNAVAILABLE, "come back at once", retry_after_s=0.001)


@pytest.mark.parametrize(("wait_s", "fails"), [(1.0, False), (29.0, True)])
async def test_a_refusal_for_lack_of_a_slot_counts_as_a_failure_if_it_comes_late(
    tmp_path: Path, wait_s: float, fails: bool
) -> None:
    follower = make_follower(tmp_path)
    pool = follower.pool
    assert isinstance(pool.clock, VirtualClock)
    named = NamedSource("peer", Late(pool.clock, wait_s), SourceKind.PEER, head=HUGE)
    pool.add(named)
    await follower.heads.look()
    assert named.rests_until_s > pool.clock.monotonic_s()
    assert (named.failures > 0) is fails


async def test_a_source_that_withholds_manifests_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "HEDGE_S", 0.2)
    origin = publishing(12)
    liar = Stalled("head", run=origin)
    follower: Follower = make_follower(tmp_path, liar, origin, poll_s=0.05)
    await follower.heads.look()
    async with asyncio.timeout(5):
        signed = await follower.heads.manifest(0)
    assert signed.manifest.policy_version == 0
    assert liar.num_asked < 8, "once the other source has answered, it is asked first"


async def test_a_peer_that_withholds_a_manifest_for_comparison_delays_no_head(tmp_path: Path) -> None:
    origin = publishing(1)
    follower = make_follower(tmp_path, origin)
    await follower.heads.look()
    liar = Stalled()
    follower.pool.add(NamedSource("liar", liar, SourceKind.PEER, head=0))
    origin.publish(table_weights(1))
    async with asyncio.timeout(5):
        await follower.heads.look()
    assert (follower.heads.newest, liar.num_asked) == (1, 1)


async def test_peers_that_withhold_a_small_blob_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOB_S_MAX", 0.1)
    blob = MODEL_FILES["config.json"]
    entry = PartEntry(digest=digest_of(blob), size=len(blob))
    origin, liars = publishing(1), [Stalled() for _ in range(20)]
    pool = SourcePool([("origin", origin)], clock=SystemClock(), rng=random.Random(0))
    for number, liar in enumerate(liars):
        pool.add(NamedSource(f"liar-{number}", liar, SourceKind.PEER, has={entry.digest: 1}))
    assert await pool.fetch_blob(entry) == blob
    assert sum(liar.num_asked for liar in liars) == sources.PEERS_FIRST_MAX
    assert await pool.fetch_blob(entry) == blob


class Spoiling(Stalled):
    """A source whose first range of a blob is wrong, and that never sends the second."""

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        assert end is not None
        if start:
            await self._take("blob")
        return bytes(end - start)


@pytest.mark.parametrize("kind", [SourceKind.ORIGIN, SourceKind.PEER])
async def test_a_source_that_breaks_off_spoils_no_bytes_of_another(
    monkeypatch: pytest.MonkeyPatch, kind: SourceKind
) -> None:
    monkeypatch.setattr(sources, "BLOB_S_MAX", 0.1)
    monkeypatch.setattr(sources, "RANGE_BYTES", 64)
    monkeypatch.setattr(sources, "ROUNDS_MAX", 1)
    blob = random.Random(1).randbytes(200)
    entry = PartEntry(digest=digest_of(blob), size=len(blob))
    honest = publishing(1)
    honest.blobs[entry.digest] = blob
    pool = SourcePool([("first", Spoiling()), ("second", honest)], clock=SystemClock(), rng=random.Random(0))
    if kind is SourceKind.PEER:
        pool = SourcePool([("origin", honest)], clock=SystemClock(), rng=random.Random(0))
        pool.add(NamedSource("liar", Spoiling(), SourceKind.PEER, has={entry.digest: 1}))
    assert await pool.fetch_blob(entry) == blob
    assert [named.failures for named in pool.all if isinstance(named.source, Spoiling)] == [1]
    assert [named.failures for named in pool.all if named.source is honest] == [0]


async def test_a_mirror_that_withholds_a_small_blob_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOB_S_MAX", 0.01)
    blob = MODEL_FILES["config.json"]
    origin, mirror = Stalled(), publishing(1)
    pool = SourcePool([("origin", origin), ("mirror", mirror)], clock=SystemClock(), rng=random.Random(0))
    assert await pool.fetch_blob(PartEntry(digest=digest_of(blob), size=len(blob))) == blob


async def test_a_source_that_withholds_statements_delays_no_timestamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "ANSWER_S_MAX", 0.05)
    origin = publishing(1)
    named = [("rings", Stalled("timestamp")), ("stamps", Stalled("key_ring")), ("origin", origin)]
    peers = [(f"peer-{number}", Stalled()) for number in range(2)]
    made = Trust(origin.run, named, tmp_path, clock=SystemClock(), peers=lambda: peers)
    async with asyncio.timeout(5):
        await made.refresh()
    assert made.fault() == ""


async def test_a_source_that_withholds_what_a_link_pins_delays_no_first_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "HEDGE_S", 0.01)
    origin, liars = publishing(0), [Stalled(), Stalled()]
    async with asyncio.timeout(5):
        run = await pinned.fetch_run(origin.run.digest, *liars, origin, clock=SystemClock())
        folder = await pinned.fetch_model_files([*liars, origin], run, tmp_path / "model")
    assert pinned.model_files_in(folder, run) == MODEL_FILES
