"""A peer's head counts once its manifest is verified, and is then passed on at once. False claims cost few requests."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

import pytest
from tests.node.table_engine import table_weights
from tests.node.worker_world import COORDINATOR, STRANGER, MemorySource, following, make_follower, make_run
from tests.time_world import VirtualClock, until

from prime_node.broadcast.follow.follower import Follower
from prime_node.broadcast.swarm.sources import NamedSource, SourceKind
from prime_protocol.envelope import Envelope
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey

HUGE = 10**6


class StoppedClock(VirtualClock):
    """Clock on which no pause ends, so that nothing is found by polling."""

    async def sleep(self, seconds: float) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nothing sets this event")


class Liar(MemorySource):
    """A peer that announces a head again after each request for it, and never serves it."""

    def __init__(self, refusal: RemoteError | None = None) -> None:
        super().__init__(make_run())
        self.named = NamedSource("liar", self, SourceKind.PEER, head=HUGE)
        self._refusal = refusal

    async def head(self, *, wait_s: float = 0.0) -> Envelope | None:
        self.num_asked += 1
        asyncio.get_running_loop().call_soon(setattr, self.named, "head", HUGE)
        if self._refusal is not None:
            raise self._refusal
        return None


def announce(follower: Follower, source: MemorySource, version: int) -> None:
    """Announce a head as a linked peer does."""
    follower.pool.add(NamedSource("peer", source, SourceKind.PEER, head=version))


def publishing(num_policies: int) -> MemorySource:
    source = MemorySource(make_run())
    for version in range(num_policies):
        source.publish(table_weights(version))
    return source


async def test_a_verified_head_is_served_before_its_policy_is_here_and_without_a_poll(tmp_path: Path) -> None:
    source = publishing(2)
    source.blobs.clear()
    follower = make_follower(tmp_path, clock=StoppedClock())
    async with following(follower):
        announce(follower, source, 1)
        await until(lambda: follower.have_set.head == 1)
        assert follower.manifest_at_hand(1) == source.manifests[1]
        assert follower.latest() is None


@pytest.mark.parametrize("key", [COORDINATOR, STRANGER], ids=["coordinator", "stranger"])
async def test_a_head_that_the_trainer_has_not_signed_is_neither_followed_nor_passed_on(
    tmp_path: Path, key: SigningKey
) -> None:
    """A stolen coordinator key announces nothing either."""
    source, forged = publishing(1), MemorySource(make_run())
    forged.publish(table_weights(7), key=key)
    follower = make_follower(tmp_path, clock=StoppedClock())
    async with following(follower):
        announce(follower, forged, 0)
        await until(lambda: [one for one in follower.pool.peers if one.failures])
        assert (follower.have_set.head, follower.manifest_at_hand(0)) == (-1, None)
        announce(follower, source, 0)
        await until(lambda: follower.have_set.head == 0)
        assert follower.manifest_at_hand(0) == source.manifests[0]


async def test_a_peer_that_claims_a_head_again_and_again_is_asked_less_and_less(tmp_path: Path) -> None:
    liar, source = Liar(), publishing(1)
    follower = make_follower(tmp_path, clock=liar.clock, poll_s=1.0)
    follower.pool.add(liar.named)
    async with following(follower):
        began_s = liar.clock.monotonic_s()
        await until(lambda: liar.clock.monotonic_s() > began_s + 600)
        assert 2 < liar.num_asked < 40
        announce(follower, source, 0)
        await until(lambda: follower.have_set.head == 0)


async def test_a_peer_that_asks_to_come_back_at_once_is_asked_twice_a_second_at_most(tmp_path: Path) -> None:
    liar = Liar(RemoteError(ErrorCode.UNAVAILABLE, "come back at once", retry_after_s=0.001))
    follower = make_follower(tmp_path, clock=liar.clock, poll_s=1.0)
    follower.pool.add(liar.named)
    async with following(follower):
        began_s = liar.clock.monotonic_s()
        await until(lambda: liar.clock.monotonic_s() > began_s + 30)
        assert liar.num_asked <= 2 * 30 + 1
