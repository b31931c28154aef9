"""How many links a newcomer makes at the same time: few, so that their handshakes end in time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

from tests.node.coordinator_world import ANNA
from tests.node.mesh_world import RUN, Finder, where
from tests.time_world import VirtualClock, turns

from prime_node.broadcast.swarm.directory import Directory
from prime_node.broadcast.swarm.neighbours import AT_ONCE_MAX, SLOW_S, Neighbours
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.broadcast.swarm.topology import TopologyRules
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.patience import cancel_all
from prime_protocol.identity import SigningKey
from prime_protocol.peers import PeerRecord, PeerUpdate


class Silent:
    """Link of a peer that answers once it may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def updates(self) -> AsyncIterator[PeerUpdate]:
        await self.may_answer.wait()
        yield PeerUpdate()
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def test_a_newcomer_makes_few_links_at_once_and_more_when_some_answer_or_are_slow() -> None:
    clock, rng, links = VirtualClock(), random.Random(1), dict[str, Silent]()

    def connect(record: PeerRecord) -> Silent | None:
        if record.peer in undialable:
            return None
        return links.setdefault(record.peer, Silent())

    keys = [SigningKey(bytes([number]) * 32) for number in range(1, 201)]
    undialable = {key.key_id for key in keys[:160]}
    directory = Directory(RUN, ANNA, Finder(), clock=clock, rng=rng)
    directory.records.update((key.key_id, where(key)) for key in keys)
    rules = TopologyRules(neighbours_max=30)
    neighbours = Neighbours(
        directory,
        SourcePool([], clock=clock, rng=rng),
        connect,  # type: ignore[arg-type]
        Uplink(clock=clock),
        SwarmTasks(clock),
        clock=clock,
        rng=rng,
        rules=rules,
    )
    before = asyncio.all_tasks()
    neighbours.link_more()
    parents_max = 2  # they are always asked
    begun = len(links)
    assert AT_ONCE_MAX <= begun <= AT_ONCE_MAX + parents_max
    neighbours.link_more()
    assert len(links) == begun
    for link in [*links.values()][:3]:
        link.may_answer.set()
    await turns()
    neighbours.link_more()
    assert AT_ONCE_MAX + 3 <= len(links) <= begun + 3
    clock.seconds += SLOW_S
    neighbours.link_more()
    assert len(links) == 3 + 2 * AT_ONCE_MAX + (begun - AT_ONCE_MAX if begun > AT_ONCE_MAX else 0)
    for _ in range(5):
        clock.seconds += SLOW_S
        neighbours.link_more()
    assert len(links) == rules.neighbours_max
    await cancel_all(*(asyncio.all_tasks() - before))
