"""A thief has the coordinator's key and shows forged timestamps as a peer. Machines with an honest source continue."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.node.table_engine import table_weights
from tests.node.trust_world import NEW_COORDINATOR, make_source, make_trust, rotate
from tests.node.worker_world import (
    COORDINATOR,
    MemorySource,
    make_run,
)
from tests.time_world import VirtualClock

from prime_node.broadcast.follow.trust import Trust
from prime_protocol import limits
from prime_protocol.envelope import Envelope, PayloadType, seal
from prime_protocol.key_ring import ChainPoint
from prime_protocol.timestamp import Timestamp


class Thief:
    """A linked peer that has a stolen coordinator key and shows one forged timestamp. It has the run's public manifests."""

    def __init__(self, honest: MemorySource, *, head: ChainPoint | None = None, key_ring: int = 0) -> None:
        self._honest, self._head, self._key_ring = honest, head, key_ring

    async def timestamp(self) -> Envelope:
        now_ms = self._honest.now_ms()
        head = self._head or self._honest.signed(max(self._honest.manifests)).point
        forged = Timestamp(
            run=self._honest.run.digest,
            head=head,
            key_ring=self._key_ring,
            issued_at_ms=now_ms + 1,
            expires_at_ms=now_ms + 600_000,
        )
        return seal(forged, PayloadType.TIMESTAMP, COORDINATOR)

    async def manifest(self, policy_version: int) -> Envelope:
        return await self._honest.manifest(policy_version)


FORGED = [
    {"key_ring": limits.KEY_RINGS_MAX},
    {"head": ChainPoint(policy_version=10**6, manifest="f" * 64)},
    {"head": ChainPoint(policy_version=make_run().spec.max_steps, manifest="f" * 64)},
]


@pytest.mark.parametrize("forged", FORGED, ids=["key ring", "far head", "last policy"])
async def test_a_peer_with_a_stolen_coordinator_key_stops_nobody_who_has_an_honest_source(
    tmp_path: Path, forged: dict[str, Any]
) -> None:
    clock = VirtualClock()
    honest = make_source(clock)
    thief = Thief(honest, **forged)
    run = make_run()
    trust = Trust(
        run, [("honest", honest)], tmp_path, clock=clock, rng=random.Random(1), peers=lambda: [("thief", thief)]
    )
    for _ in range(30):
        await trust.refresh()
        assert trust.fault() == ""
        clock.seconds += 60
    honest.away = True
    clock.seconds += 600 + 2 * limits.REQUEST_AGE_S_MAX
    await trust.refresh()
    assert "has expired" in trust.fault(), "a freeze is noticed afterwards"


@pytest.mark.parametrize("forged", FORGED, ids=["key ring", "far head", "last policy"])
async def test_a_key_ring_heals_those_who_believed_the_key_that_it_replaces(
    tmp_path: Path, forged: dict[str, Any]
) -> None:
    """The thief was a source here, and so its timestamp counted."""
    clock = VirtualClock()
    honest = make_source(clock)
    honest.shown_timestamp = await Thief(honest, **forged).timestamp()
    trust = make_trust(tmp_path, clock, honest)
    await trust.refresh()
    honest.shown_timestamp = None
    clock.seconds += 900
    await trust.refresh()
    assert trust.fault()
    honest.key = NEW_COORDINATOR
    rotate(honest, coordinator=(NEW_COORDINATOR,))
    await trust.refresh()
    assert trust.fault() == ""
    assert make_trust(tmp_path, clock, honest).fault() == ""


async def test_a_peer_that_shows_the_manifest_of_a_newer_timestamp_ends_a_freeze(tmp_path: Path) -> None:
    clock = VirtualClock()
    frozen, peer = make_source(clock), make_source(clock, policies=2)
    frozen.shown_timestamp = await frozen.timestamp()
    clock.seconds += 1
    trust = Trust(
        make_run(), [("frozen", frozen)], tmp_path, clock=clock, rng=random.Random(1), peers=lambda: [("peer", peer)]
    )
    await trust.refresh()
    assert trust.newest is not None
    assert trust.newest.policy_version == 1


async def test_a_peers_timestamp_that_was_overtaken_while_its_manifest_came_is_not_taken(tmp_path: Path) -> None:
    clock = VirtualClock()
    source = make_source(clock, policies=2)

    class Slow(Thief):
        async def timestamp(self) -> Envelope:
            return late

        async def manifest(self, policy_version: int) -> Envelope:
            clock.seconds += 1
            source.publish(table_weights(2))
            source.shown_timestamp = None
            linked.clear()
            await trust.refresh()
            return await super().manifest(policy_version)

    source.shown_timestamp = source.timestamp_of(source.manifests[0])
    clock.seconds += 1
    late = source.timestamp_of(source.manifests[1])
    linked = [("slow", Slow(source))]
    trust = Trust(
        make_run(), [("source", source)], tmp_path, clock=clock, rng=random.Random(1), peers=lambda: list(linked)
    )
    await trust.refresh()
    assert trust.newest is not None
    assert trust.newest.policy_version == 2
