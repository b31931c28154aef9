"""A stolen coordinator key that announces policies that do not exist hides no policy that does."""

from __future__ import annotations

import random

import pytest
from tests.node.table_engine import table_weights
from tests.node.worker_world import COORDINATOR, ROOT, MemorySource, make_run, next_ring
from tests.time_world import VirtualClock

from prime_lab.memory_network import MemoryNetwork, MemorySwitch
from prime_node.broadcast.swarm.gossiped_heads import RECENT_MAX, AnnouncedHeads
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.ports.peer_network import GossipJudgement
from prime_node.ports.transport import Unreachable
from prime_protocol.envelope import Envelope
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import ChainPoint
from prime_protocol.run_spec import PinnedRun

NEW_COORDINATOR = SigningKey(b"\x51" * 32)
AUTHOR, HUGE = "author", 10**6


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.run: PinnedRun = make_run()
        self.pool = SourcePool([], clock=self.clock, rng=random.Random(1))
        network = MemoryNetwork(MemorySwitch(), "listener", run=self.run.digest)
        self.heads = AnnouncedHeads(network, self.run, self.pool, self.clock)
        self.source = MemorySource(make_run())
        self.source.now_ms = self.clock.now_ms
        for version in range(3):
            self.source.publish(table_weights(version))

    def timestamp(self, version: int, *, key: SigningKey = COORDINATOR) -> Envelope:
        return self.source.timestamp_of(None, head=ChainPoint(policy_version=version, manifest="f" * 64), key=key)

    async def announce(self, envelope: Envelope) -> GossipJudgement:
        judgement = await self.heads.judge("forwarder", envelope.to_bytes())
        if judgement is GossipJudgement.ACCEPT:
            await self.heads.hear(AUTHOR, envelope.to_bytes())
        return judgement


async def test_an_announced_policy_that_no_peer_has_hides_no_manifest() -> None:
    world = World()
    assert await world.announce(world.timestamp(HUGE)) is GossipJudgement.ACCEPT
    for version in (1, 2):
        manifest = world.source.signed(version).envelope
        assert await world.announce(manifest) is GossipJudgement.ACCEPT
        assert await world.heads.head() == manifest
    with pytest.raises((RemoteError, Unreachable)):
        await world.heads.head()  # what it has shown already does not count as an answer to a newer announcement


async def test_false_timestamps_do_not_crowd_out_a_true_one() -> None:
    world = World()
    for number in range(2 * RECENT_MAX):
        assert await world.announce(world.timestamp(HUGE + number)) is GossipJudgement.ACCEPT
    assert await world.announce(world.timestamp(2)) is GossipJudgement.ACCEPT
    with pytest.raises(Unreachable, match="no connected peer has manifest 2"):
        await world.heads.manifest(2)


async def test_a_key_ring_voids_what_the_former_key_announced() -> None:
    world = World()
    for number in range(RECENT_MAX):
        await world.announce(world.timestamp(HUGE + number))
    published = world.source.signed(2).point
    world.run.keys.add(next_ring(world.run.keys, ROOT, published=published, coordinator=(NEW_COORDINATOR,)))
    assert await world.heads.head() is None
    assert await world.announce(world.timestamp(HUGE)) is GossipJudgement.REJECT
    assert await world.announce(world.timestamp(2, key=NEW_COORDINATOR)) is GossipJudgement.ACCEPT
    assert [named.head for named in world.pool.peers] == [2]
