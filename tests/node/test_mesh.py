"""Links without a coordinator: peers that know each other only by hints connect; peers that the coordinator names count more."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.node.coordinator_world import ANNA, BEN, COORDINATOR, TRAINER
from tests.node.mesh_world import RUN, Finder, where
from tests.node.swarm_world import CORA
from tests.time_world import until

from prime_lab.memory_network import MemoryNetwork, MemorySwitch
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.broadcast.swarm.directory import Directory
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.mesh import LINKS_WISHED, Mesh
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.peer import Peer
from prime_node.broadcast.swarm.serving import PeerService
from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.ports.peer_network import ConnectedPeer, PeerAddress
from prime_protocol import limits
from prime_protocol.identity import KeyId, SigningKey


@dataclass
class Meshes:
    """Peers on one switch."""

    finder: Finder
    switch: MemorySwitch = field(default_factory=MemorySwitch)
    directories: dict[KeyId, Directory] = field(default_factory=dict)
    networks: dict[KeyId, MemoryNetwork] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def add(self, key: SigningKey, *, is_hub: bool = False) -> MemoryNetwork:
        network = self.networks[key.key_id] = MemoryNetwork(self.switch, key.key_id, run=RUN.digest)
        await network.start()
        if not is_hub:
            clock, rng = SystemClock(), random.Random(1)
            directory = Directory(RUN, key, self.finder, clock=clock, rng=rng)
            self.directories[key.key_id] = directory
            mesh = Mesh(RUN, network, directory, clock=clock, rng=rng)
            self.tasks += [
                asyncio.create_task(directory.run(list, lambda: None)),
                asyncio.create_task(mesh.run()),
            ]
        return network

    def are_linked(self, one: SigningKey, other: SigningKey) -> Callable[[], bool]:
        return lambda: other.key_id in {link.peer for link in self.networks[one.key_id].connected()}


@contextlib.asynccontextmanager
async def meshes(finder: Finder) -> AsyncIterator[Meshes]:
    made = Meshes(finder)
    try:
        yield made
    finally:
        for task in made.tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        for network in made.networks.values():
            await network.close()


async def test_links_lead_past_the_coordinators_host() -> None:
    async with meshes(Finder((where(COORDINATOR), where(ANNA), where(BEN)))) as made:
        await made.add(COORDINATOR, is_hub=True)
        await made.add(ANNA)
        await made.add(BEN)
        await until(made.are_linked(ANNA, COORDINATOR))
        await until(made.are_linked(ANNA, BEN))


async def test_a_handful_of_links_is_enough() -> None:
    keys = [SigningKey(bytes([120 + number]) * 32) for number in range(3 * LINKS_WISHED)]
    async with meshes(Finder(tuple(where(key) for key in keys))) as made:
        for key in keys:
            await made.add(key, is_hub=key is not keys[0])
        await until(lambda: len(made.networks[keys[0].key_id].connected()) == LINKS_WISHED)


async def test_peers_that_the_coordinator_names_are_tried_before_any_number_of_hints() -> None:
    """Any machine on the local network can hint at a thousand peers that do not exist."""
    dialled: list[KeyId] = []

    class Noting(MemoryNetwork):
        async def connect(self, address: PeerAddress, *, timeout_s: float = 10.0) -> ConnectedPeer:
            dialled.append(address.peer)
            return await super().connect(address, timeout_s=timeout_s)

    keys = [SigningKey(bytes([120 + number]) * 32) for number in range(LINKS_WISHED)]
    made_up = [SigningKey(bytes([1, number]) + bytes(30)).key_id for number in range(200)]
    async with meshes(Finder()) as made:
        for key in keys:
            await made.add(key, is_hub=True)
        network, clock, rng = Noting(made.switch, ANNA.key_id, run=RUN.digest), SystemClock(), random.Random(1)
        made.networks[ANNA.key_id] = network
        await network.start()
        network.learn(tuple(PeerAddress(peer, ("/ip4/192.0.2.1/tcp/9",)) for peer in made_up))
        directory = Directory(RUN, ANNA, made.finder, clock=clock, rng=rng)
        directory.records.update({key.key_id: where(key) for key in keys})
        made.tasks.append(asyncio.create_task(Mesh(RUN, network, directory, clock=clock, rng=rng).run()))
        await until(lambda: len(network.connected()) == LINKS_WISHED)
    assert set(dialled) == {key.key_id for key in keys}


async def test_peers_that_no_list_names_connect_by_the_hints_of_the_table() -> None:
    async with meshes(Finder(is_away=True)) as made:
        hub = await made.add(TRAINER, is_hub=True)
        for key in (ANNA, BEN):
            network = await made.add(key)
            await network.connect(PeerAddress(hub.peer_id, hub.addresses()))
        await until(made.are_linked(ANNA, BEN))
        both = [made.directories[key.key_id] for key in (ANNA, BEN)]
        assert any(directory.hinted for directory in both)
        assert not any(directory.records for directory in both)


async def test_hints_count_only_while_the_coordinator_is_away() -> None:
    async with meshes(Finder(is_away=True)) as made:
        network, directory = await made.add(ANNA), made.directories[ANNA.key_id]
        network.learn((PeerAddress(BEN.key_id, ("/ip4/192.0.2.1/tcp/9",)),))
        await until(lambda: BEN.key_id in directory.candidates)
        made.finder.is_away, made.finder.peers = False, (where(CORA),)
        await until(lambda: set(directory.candidates) == {CORA.key_id})


async def test_hints_are_few_and_never_in_the_way_of_what_the_coordinator_says() -> None:
    directory = Directory(RUN, ANNA, Finder(), clock=SystemClock(), rng=random.Random(1))
    directory.records[BEN.key_id] = where(BEN)
    strangers = [SigningKey(bytes([1, number]) + bytes(30)).key_id for number in range(2 * limits.PEER_HINTS_MAX)]
    directory.hint([PeerAddress(peer, ("/ip4/192.0.2.1/tcp/9",)) for peer in (BEN.key_id, ANNA.key_id, *strangers)])
    directory.hint([PeerAddress(CORA.key_id, ()), PeerAddress(CORA.key_id, ("no address\n",))])
    assert len(directory.hinted) == limits.PEER_HINTS_MAX
    assert not {ANNA.key_id, BEN.key_id, CORA.key_id} & directory.hinted.keys()
    assert next(iter(directory.candidates)) == BEN.key_id
    assert directory.candidates[BEN.key_id] == where(BEN)


async def test_a_hole_that_was_not_punched_is_told_and_what_follows_from_it(tmp_path: Path) -> None:
    class Home(MemoryNetwork):
        holes = (0, 0)

        def punched(self) -> tuple[int, int]:
            return self.holes

    clock = SystemClock()
    network = Home(MemorySwitch(), ANNA.key_id, run=RUN.digest)
    directory = Directory(RUN, ANNA, Finder(), clock=clock, rng=random.Random(1))
    parts = PartStore(tmp_path / "parts", bytes_max=2**20)
    service = PeerService(RUN, ANNA, HaveSet(), parts, Uplink(clock=clock), clock, lambda version: None)
    peer = Peer(SwarmConfig(), service, AiohttpServer(), directory, SwarmTasks(clock), None, network)
    assert "hole punching" not in peer.describe()
    network.holes = (3, 3)
    assert peer.describe().endswith("(hole punching worked for 3 of 3 peers)")
    network.holes = (2, 3)
    assert "hole punching worked for 2 of 3 peers" in peer.describe()
    assert peer.describe().endswith("pieces of the other peers come through reachable peers and the coordinator")
