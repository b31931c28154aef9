"""A machine's knowledge of its run's keys and newest policy only grows, across sources and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.node.table_engine import table_weights
from tests.node.trust_world import NEW_COORDINATOR, NEW_TRAINER, make_source, make_trust, rotate
from tests.node.worker_world import (
    COORDINATOR,
    ROOT,
    STRANGER,
    TRAINER,
    MemorySource,
    make_run,
    names_in,
    next_ring,
)
from tests.time_world import VirtualClock, until

from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.follow.trust import POLL_S_MAX, POLL_S_MIN, Trust
from prime_node.broadcast.swarm.sources import SourcePool
from prime_protocol import limits
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, LocalError, RemoteError


async def test_a_frozen_run_is_noticed_when_its_timestamp_expires_and_forgiven_when_a_new_one_comes(
    tmp_path: Path,
) -> None:
    clock = VirtualClock()
    source = make_source(clock)
    trust = make_trust(tmp_path, clock, source)
    assert "no source says" in trust.fault()
    await trust.refresh()
    assert trust.fault() == ""
    source.shown_timestamp = await source.timestamp()  # from now on always this one
    clock.seconds += 600 + limits.REQUEST_AGE_S_MAX - 1
    await trust.refresh()
    assert trust.fault() == ""
    clock.seconds += 2
    await trust.refresh()
    assert "is 721 s old by this machine's clock and has expired" in trust.fault()
    source.shown_timestamp = None
    await trust.refresh()
    assert trust.fault() == ""


async def test_sources_without_a_fresh_timestamp_are_asked_less_and_less_often(tmp_path: Path) -> None:
    """Before, each machine asked every source every two seconds, for as long as a coordinator was away."""
    clock = VirtualClock()
    source = make_source(clock, policies=0)
    source.away = True
    trust = make_trust(tmp_path, clock, source)
    following_it = asyncio.create_task(trust.follow())
    await clock.sleep(600.0)
    assert 600 / POLL_S_MAX < source.num_asked < 2 * 600 / POLL_S_MAX + 10
    source.away = False
    source.publish(table_weights(0))
    await clock.sleep(POLL_S_MAX)
    assert trust.fault() == ""
    source.away = True
    clock.seconds += 900.0
    asked = source.num_asked
    await clock.sleep(10 * POLL_S_MIN)
    assert source.num_asked >= asked + 3, "a new fault is looked into at once"
    following_it.cancel()


async def test_one_honest_source_is_enough(tmp_path: Path) -> None:
    clock = VirtualClock()
    honest, frozen, away = (make_source(clock) for _ in range(3))
    frozen.shown_timestamp = frozen.timestamp_of(frozen.shown_head, age_s=3_600)
    away.away = True
    trust = make_trust(tmp_path, clock, frozen, away, honest)
    await trust.refresh()
    assert trust.fault() == ""


async def test_a_run_that_is_over_cannot_be_frozen_once_its_last_manifest_was_seen(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = MemorySource(make_run(max_steps=1))
    source.now_ms = clock.now_ms
    for version in range(2):
        source.publish(table_weights(version))
    last = source.manifests.pop(1)
    source.shown_timestamp = source.timestamp_of(last)
    trust = Trust(make_run(max_steps=1), [("source", source)], tmp_path, clock=clock, rng=random.Random(1))
    await trust.refresh()
    clock.seconds += 1e6
    assert "has expired" in trust.fault(), "anyone with the coordinator's key can say that it is over"
    source.manifests[1] = last
    await trust.refresh()
    assert trust.fault() == ""


async def test_a_key_ring_that_is_announced_and_hidden_is_a_freeze(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock)
    source.shown_timestamp = source.timestamp_of(source.shown_head, key_ring=1)
    trust = make_trust(tmp_path, clock, source)
    await trust.refresh()
    assert trust.fault() == "key ring 1 is in force, and no source shows it"


async def test_a_rollback_is_not_believed_after_a_restart_either(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock, policies=3)
    await make_trust(tmp_path, clock, source).refresh()
    clock.seconds += 10
    old = make_source(clock, policies=2)
    again = make_trust(tmp_path, clock, old)
    await again.refresh()
    assert again.newest is not None
    assert again.newest.policy_version == 2
    clock.seconds += 1_000
    await again.refresh()
    assert "has expired" in again.fault()


async def test_rings_are_followed_to_their_end_before_the_timestamp_is_read(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock)
    rotate(source, trainer=(NEW_TRAINER,))
    rotate(source, coordinator=(NEW_COORDINATOR,))
    source.shown_timestamp = source.timestamp_of(source.shown_head, key=NEW_COORDINATOR)
    trust = make_trust(tmp_path, clock, source)
    await trust.refresh()
    assert (trust.run.keys.version, trust.fault()) == (2, "")
    assert names_in(tmp_path / "keys") == ["0001.json", "0002.json"]


async def test_a_revocation_survives_a_restart_behind_a_source_that_hides_it(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock)
    rotate(source, coordinator=(NEW_COORDINATOR,))
    source.shown_timestamp = source.timestamp_of(source.shown_head, key=NEW_COORDINATOR)
    await make_trust(tmp_path, clock, source).refresh()
    clock.seconds += 10
    thief = make_source(clock)  # the world as it was, with the old coordinator's key
    again = make_trust(tmp_path, clock, thief)
    await again.refresh()
    assert again.newest is not None
    assert again.newest.key_ring == 1
    clock.seconds += 1_000
    await again.refresh()
    assert "has expired" in again.fault()


def not_the_roots(source: MemorySource) -> Envelope:
    return next_ring(source.run.keys, TRAINER, COORDINATOR, STRANGER, root=(STRANGER,))


def a_gap(source: MemorySource) -> Envelope:
    ahead = make_source(VirtualClock())
    rotate(ahead)
    return next_ring(ahead.run.keys, ROOT)


@pytest.mark.parametrize("forge", [not_the_roots, a_gap])
async def test_a_ring_that_does_not_hold_changes_nothing(
    tmp_path: Path, forge: Callable[[MemorySource], Envelope]
) -> None:
    clock = VirtualClock()
    liar, honest = make_source(clock), make_source(clock)
    liar.key_rings.append(forge(liar))
    trust = make_trust(tmp_path, clock, liar, honest)
    await trust.refresh()
    assert (trust.run.keys.version, trust.fault()) == (0, "")
    assert names_in(tmp_path / "keys") == []


async def test_damaged_files_are_asked_for_again(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock)
    rotate(source)
    await make_trust(tmp_path, clock, source).refresh()
    (tmp_path / "keys" / "0001.json").write_bytes(b"{")
    (tmp_path / "timestamp.json").write_bytes(b"{")
    again = make_trust(tmp_path, clock, source)
    assert again.newest is None
    await again.refresh()
    assert (again.run.keys.version, again.fault()) == (1, "")


async def test_what_is_signed_by_a_key_that_is_new_is_checked_again_after_asking(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock)
    trust = make_trust(tmp_path, clock, source)
    tried = []

    def check() -> int:
        tried.append(trust.run.keys.version)
        if not trust.run.keys.version:
            raise RemoteError(ErrorCode.BAD_SIGNATURE, "who is that?")
        return 7

    rotate(source)
    assert await trust.verified(check) == 7
    assert tried == [0, 1]
    with pytest.raises(RemoteError, match="banned"):
        await trust.verified(lambda: exec_raise(RemoteError(ErrorCode.BANNED, "other faults are not about keys")))


def exec_raise(error: Exception) -> None:
    raise error


# The follower


@contextlib.asynccontextmanager
async def following(follower: Follower):  # type: ignore[no-untyped-def]
    task = asyncio.create_task(follower.follow())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, LocalError):
            await task


def make_follower(trust: Trust, folder: Path, clock: VirtualClock, *sources: MemorySource) -> Follower:
    named = [(f"source-{i}", source) for i, source in enumerate(sources)]
    pool = SourcePool(named, clock=clock, rng=random.Random(1))
    return Follower(trust.run, pool, folder, clock=clock, poll_s=0.1)


async def test_policies_of_the_new_trainer_are_followed_and_those_of_the_old_one_are_not(tmp_path: Path) -> None:
    clock = VirtualClock()
    source, thief = make_source(clock), make_source(clock)
    trust = make_trust(tmp_path / "t", clock, source)
    follower = make_follower(trust, tmp_path / "c", clock, thief, source)
    async with following(follower):
        assert (await follower.wait_newer(-1)).version == 0
        rotate(source, trainer=(NEW_TRAINER,))
        await trust.refresh()
        thief.publish(table_weights(66), key=TRAINER)
        source.publish(table_weights(1), key=NEW_TRAINER)
        policy = await follower.wait_newer(0)
        assert policy.signed.digest == source.signed(1).digest
        thief.publish(table_weights(67), key=TRAINER)
        await clock.sleep(10.0)
        assert follower.versions() == (0, 1)


async def test_a_head_below_what_the_root_names_is_no_head_for_a_newcomer(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock, policies=3)
    rotate(source)
    behind = make_source(clock, policies=2)
    trust = make_trust(tmp_path / "t", clock, source)
    await trust.refresh()
    follower = make_follower(trust, tmp_path / "c", clock, behind)
    async with following(follower):
        await clock.sleep(10.0)
        assert follower.latest() is None
    caught_up = make_follower(trust, tmp_path / "d", clock, behind, source)
    async with following(caught_up):
        assert (await caught_up.wait_newer(-1)).version == 2


async def test_a_follower_of_a_thief_learns_it_from_the_root_and_starts_again(tmp_path: Path) -> None:
    clock = VirtualClock()
    source, thief = make_source(clock), make_source(clock)
    for version in (1, 2):
        thief.publish(table_weights(60 + version))
    trust = make_trust(tmp_path / "t", clock, source)
    follower = make_follower(trust, tmp_path / "c", clock, thief)
    async with following(follower) as task:
        assert (await follower.wait_newer(1)).version == 2
        rotate(source, trainer=(NEW_TRAINER,))
        await trust.refresh()
        await until(task.done)
        with pytest.raises(LocalError, match="is not part of the run by key ring 1"):
            task.result()
    assert len(names_in(tmp_path / "c" / "evidence")) == 1
    source.publish(table_weights(1), key=NEW_TRAINER)
    again = make_follower(trust, tmp_path / "c", clock, thief, source)
    async with following(again):
        assert (await again.wait_newer(-1)).signed.digest == source.signed(1).digest


async def test_a_follower_of_the_wrong_one_of_two_manifests_starts_again_once_the_root_names_a_later_policy(
    tmp_path: Path,
) -> None:
    """One key signed both, so no signature tells them apart, and a follower of the other one waited forever."""
    clock = VirtualClock()
    source, other = make_source(clock), make_source(clock)
    other.publish(table_weights(61))
    trust = make_trust(tmp_path / "t", clock, source)
    follower = make_follower(trust, tmp_path / "c", clock, other, source)
    async with following(follower) as task:
        assert (await follower.wait_newer(0)).signed.digest == other.signed(1).digest
        for version in (1, 2):
            source.publish(table_weights(version))
        await until((tmp_path / "c" / "evidence").exists)
        await clock.sleep(10.0)
        latest = follower.latest()
        assert latest is not None
        assert latest.version == 1, "without the root's word, it follows neither further"
        rotate(source)
        await trust.refresh()
        await until(task.done)
        with pytest.raises(LocalError, match="there is another one, and the root names a later policy"):
            task.result()
    again = make_follower(trust, tmp_path / "c", clock, other, source)
    async with following(again):
        assert (await again.wait_newer(-1)).signed.digest == source.signed(2).digest
