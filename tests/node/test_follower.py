"""The follower accepts only verified data, and reaches the head in spite of bad sources."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from tests.node.table_engine import table_weights
from tests.node.worker_world import STRANGER, MemorySource, following, make_follower, make_run, settle
from tests.time_world import VirtualClock, turns, until

from prime_node.adapters.web.http_answers import STALL_S
from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.ports.transport import Unreachable
from prime_protocol.checkpoint import tensor_table
from prime_protocol.errors import ErrorCode, LocalError, RemoteError
from prime_protocol.weights import root_of

RUN = make_run()


async def test_the_newest_policy_is_staged_and_intermediate_ones_are_not_downloaded(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    for version in range(5):
        source.publish(table_weights(version))
    async with following(make_follower(tmp_path, source)) as follower:
        policy = await follower.wait_newer(-1)
    assert policy.version == 4
    assert root_of(policy.weights) == root_of(table_weights(4))
    assert set(source.blobs_asked) == {blob.digest for blob in source.signed(4).manifest.blobs}


async def test_later_policies_are_followed_as_they_come(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    async with following(make_follower(tmp_path, source)) as follower:
        for version in range(3):
            source.publish(table_weights(version))
            policy = await follower.wait_newer(version - 1)
            assert root_of(policy.weights) == root_of(table_weights(version))
        assert follower.versions() == (1, 2)


async def test_any_policy_of_the_chain_can_be_had_by_its_number(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    for version in range(6):
        source.publish(table_weights(version))
    async with following(make_follower(tmp_path, source)) as follower:
        await follower.wait_newer(-1)
        for version in (4, 1, 0, 5, 3):
            assert root_of(await follower.weights(version)) == root_of(table_weights(version))
        latest = follower.latest()
        assert latest is not None
        assert latest.version == 5


async def test_what_is_remembered_of_old_policies_is_bounded_and_they_can_still_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prime_node.broadcast.follow.known_chain.DIGESTS_MAX", 5)
    monkeypatch.setattr("prime_node.broadcast.follow.known_chain.RECENT_MAX", 2)
    monkeypatch.setattr("prime_node.broadcast.follow.update_paths.ROUTES_MAX", 4)
    source = MemorySource(RUN)
    async with following(make_follower(tmp_path, source)) as follower:
        for version in range(12):
            source.publish(table_weights(version))
            await follower.wait_newer(version - 1)
        chain, update_paths = follower.heads.chain, follower.update_paths
        assert [version for version in range(12) if chain.digest(version)] == [7, 8, 9, 10, 11]
        assert max(len(update_paths.routes), len(update_paths.roots)) <= 5  # four, and the one that was found last
        assert root_of(await follower.weights(1)) == root_of(table_weights(1))


async def test_asking_for_a_policy_waits_until_it_is_published(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    source.publish(table_weights(0))
    follower = make_follower(tmp_path, source)
    waiting = asyncio.create_task(follower.weights(1))
    await turns()
    assert not waiting.done()
    source.publish(table_weights(1))
    assert root_of(await waiting) == root_of(table_weights(1))


async def test_a_delta_is_applied_to_the_base_that_is_held(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    anchor = source.publish(table_weights(0))
    async with following(make_follower(tmp_path, source)) as follower:
        await follower.wait_newer(-1)
        source.publish(table_weights(1), base=(anchor, table_weights(0)))
        policy = await follower.wait_newer(0)
    assert root_of(policy.weights) == root_of(table_weights(1))
    assert set(source.blobs_asked) == {b.digest for v in (0, 1) for b in source.signed(v).manifest.blobs}


async def test_a_newcomer_builds_a_delta_from_its_anchor(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    last, weights = source.publish(table_weights(0)), table_weights(0)
    for version in (1, 2, 3):
        last, weights = source.publish(table_weights(version), base=(last, weights)), table_weights(version)
    async with following(make_follower(tmp_path, source)) as follower:
        policy = await follower.wait_newer(-1)
    assert policy.version == 3
    assert root_of(policy.weights) == root_of(table_weights(3))


async def test_a_manifest_of_a_stranger_is_not_followed(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    source.publish(table_weights(0))
    source.publish(table_weights(666), key=STRANGER)
    async with following(make_follower(tmp_path, source)) as follower:
        await settle(source)
        assert follower.latest() is None
        assert source.blobs_asked == []


async def test_an_honest_source_beside_a_lying_one_is_enough(tmp_path: Path) -> None:
    liar, honest = MemorySource(RUN), MemorySource(RUN)
    for source in (liar, honest):
        source.publish(table_weights(0))
    liar.blobs = {digest: bytes(len(data)) for digest, data in liar.blobs.items()}
    async with following(make_follower(tmp_path, liar, honest)) as follower:
        policy = await follower.wait_newer(-1)
    assert root_of(policy.weights) == root_of(table_weights(0))
    assert liar.blobs_asked != []


async def test_a_source_that_is_away_is_asked_again_later(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    source.publish(table_weights(0))
    source.away = True
    async with following(make_follower(tmp_path, source)) as follower:
        await settle(source)
        assert follower.latest() is None
        source.away = False
        assert (await follower.wait_newer(-1)).version == 0


@pytest.mark.parametrize("piece", [b"", b"short", b"x" * 10_000], ids=["empty", "short", "long"])
async def test_ranges_of_the_wrong_length_are_refused(tmp_path: Path, piece: bytes) -> None:
    class Sloppy(MemorySource):
        async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
            return piece

    sloppy, honest = Sloppy(RUN), MemorySource(RUN)
    for source in (sloppy, honest):
        source.publish(table_weights(0))
    async with following(make_follower(tmp_path, sloppy, honest)) as follower:
        assert root_of((await follower.wait_newer(-1)).weights) == root_of(table_weights(0))


async def test_an_older_head_is_no_rollback(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    for version in range(3):
        source.publish(table_weights(version))
    async with following(make_follower(tmp_path, source)) as follower:
        await follower.wait_newer(-1)
        source.shown_head = source.manifests[1]
        await settle(source)
        latest = follower.latest()
        assert latest is not None
        assert latest.version == 2


async def test_a_restart_does_not_open_the_door_to_a_rollback(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    for version in range(3):
        source.publish(table_weights(version))
    async with following(make_follower(tmp_path, source)) as follower:
        await follower.wait_newer(-1)
    source.shown_head = source.manifests[0]
    async with following(make_follower(tmp_path, source)) as follower:
        assert (await follower.wait_newer(-1)).version == 2


async def test_a_second_manifest_for_one_policy_is_refused_and_both_are_kept(tmp_path: Path) -> None:
    honest, forked = MemorySource(RUN), MemorySource(RUN)
    for source, last in ((honest, 1), (forked, 666)):
        source.publish(table_weights(0))
        source.publish(table_weights(last))
    async with following(make_follower(tmp_path, honest)) as follower:
        await follower.wait_newer(-1)
    async with following(make_follower(tmp_path, forked)) as follower:
        await until(lambda: len(list((tmp_path / "evidence").glob("*"))) == 2)
        latest = follower.latest()
        assert latest is None or root_of(latest.weights) == root_of(table_weights(1))
    evidence = {path.read_bytes() for path in (tmp_path / "evidence").iterdir()}
    assert evidence == {honest.manifests[1].to_bytes(), forked.manifests[1].to_bytes()}


async def test_a_fork_is_found_when_the_other_branch_continues(tmp_path: Path) -> None:
    honest, forked = MemorySource(RUN), MemorySource(RUN)
    for source, last in ((honest, 1), (forked, 666)):
        source.publish(table_weights(0))
        source.publish(table_weights(last))
    forked.publish(table_weights(667))
    async with following(make_follower(tmp_path, honest)) as follower:
        await follower.wait_newer(-1)
    async with following(make_follower(tmp_path, forked)) as follower:
        await until(lambda: len(list((tmp_path / "evidence").glob("*"))) == 2)
        assert 2 not in follower.versions()
    evidence = {path.read_bytes() for path in (tmp_path / "evidence").iterdir()}
    assert evidence == {honest.manifests[1].to_bytes(), forked.manifests[1].to_bytes()}


async def test_a_gap_in_the_chain_is_not_jumped(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    for version in range(2):
        source.publish(table_weights(version))
    async with following(make_follower(tmp_path, source)) as follower:
        await follower.wait_newer(-1)
        for version in range(2, 5):
            source.publish(table_weights(version))
        hidden = source.manifests.pop(3)
        await settle(source)
        assert 4 not in follower.versions()
        source.manifests[3] = hidden
        assert (await follower.wait_newer(3)).version == 4


async def test_a_download_that_has_failed_is_in_progress_no_more(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    source.publish(table_weights(0))
    *_, part = source.blobs
    del source.blobs[part]
    async with following(make_follower(tmp_path, source)) as follower:
        await until(lambda: part in source.blobs_asked and follower.download is None)


async def test_a_policy_that_was_published_broken_is_not_downloaded_forever(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    other = table_weights(5)
    source.publish(table_weights(0), tensors=tensor_table(other), state_root=root_of(other))
    async with following(make_follower(tmp_path, source)) as follower:
        await until(lambda: len(source.blobs_asked) == 2)
        await settle(source)
        assert follower.latest() is None
        assert len(source.blobs_asked) == 2
        with pytest.raises(RemoteError, match="published damaged") as caught:
            await follower.weights(0)
        assert caught.value.code is ErrorCode.CHAIN_BROKEN
        source.publish(table_weights(1))
        assert (await follower.wait_newer(-1)).version == 1


async def test_a_policy_whose_bytes_are_missing_is_skipped_for_the_next_one(tmp_path: Path) -> None:
    source = MemorySource(RUN)
    source.publish(table_weights(0))
    del source.blobs[source.signed(0).manifest.encodings[0].parts[0].digest]
    async with following(make_follower(tmp_path, source)) as follower:
        await settle(source)
        source.publish(table_weights(1))
        assert (await follower.wait_newer(-1)).version == 1


def test_a_folder_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    async def make() -> None:
        make_follower(tmp_path / "file")

    with pytest.raises(LocalError, match="Not a directory; choose another folder"):
        asyncio.run(make())


class Dripping(MemorySource):
    """Source that shows every head at once and gives no bytes. Like the HTTP client it gives up without progress."""

    clock: VirtualClock

    async def blob(self, digest: str, *, start: int = 0, end: int | None = None) -> bytes:
        await self.clock.sleep(STALL_S)
        raise Unreachable("no answer, or an answer without progress")


async def test_slow_retrieval_costs_one_patience_and_not_the_policy(tmp_path: Path) -> None:
    clock, slow, honest = VirtualClock(), Dripping(RUN), MemorySource(RUN)
    slow.clock = clock
    for version in range(3):
        slow.publish(table_weights(version))
        honest.publish(table_weights(version))
    began_s = clock.monotonic_s()
    pool = SourcePool([("slow", slow), ("honest", honest)], clock=clock, rng=random.Random(1))
    follower = Follower(RUN, pool, tmp_path, clock=clock, poll_s=0.1)
    async with following(follower):
        assert (await follower.wait_newer(-1)).version == 2
    assert clock.monotonic_s() - began_s < 2 * STALL_S
