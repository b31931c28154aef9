"""Workers exchange policies: over real HTTP on loopback, with a real coordinator and the trainer's seeder."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import pytest
from tests.node.coordinator_world import CONFIG_JSON, make_run, memory_parts
from tests.node.swarm_world import ANNA, BEN, CORA, WORKERS, from_peers, linked, swarm
from tests.time_world import until

from prime_node.broadcast.audit.audit import audit
from prime_node.broadcast.swarm.topology import TopologyRules, parents
from prime_node.cli import wire
from prime_protocol.digest import digest_of
from prime_protocol.errors import RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.weights import root_of

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make peers look for each other continuously."""
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MIN", 0.05)
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MAX", 0.2)


async def test_workers_link_to_the_seeder_and_to_each_other(tmp_path: Path) -> None:
    async with swarm(tmp_path, *WORKERS) as made:
        await linked(made)
        await until(lambda: all(peer.directory.reachable for _, peer in made.workers))


async def test_the_head_is_followed_when_the_coordinators_chunk_endpoint_dies(tmp_path: Path) -> None:
    async with swarm(tmp_path, *WORKERS) as made:
        await linked(made)
        published = await made.publish()
        for follower, _ in made.workers:
            assert root_of((await follower.wait_newer(-1)).weights) == published.manifest.state_root
        before = made.chunks.num_bytes
        made.chunks.is_cut = True
        for version in (1, 2):
            published = await made.publish(delta=version == 2)
            async with asyncio.timeout(20):
                for follower, _ in made.workers:
                    assert root_of((await follower.wait_newer(version - 1)).weights) == published.manifest.state_root
        assert made.chunks.num_bytes == before
        assert all(from_peers(follower, made.world.url) > 0 for follower, _ in made.workers)


async def test_the_coordinator_gives_little_when_peers_can_give(tmp_path: Path) -> None:
    async with swarm(tmp_path, *WORKERS) as made:
        await linked(made)
        published = await made.publish()
        for follower, _ in made.workers:
            await follower.wait_newer(-1)
        needed = len(made.workers) * published.manifest.encodings[0].sent_bytes
        assert made.chunks.num_bytes < needed / 3


async def test_a_coordinator_that_gives_no_chunks_gives_model_files_and_words(tmp_path: Path) -> None:
    config = memory_parts(make_run(), serve_chunks=False).config
    async with swarm(tmp_path, ANNA, config=config) as made:
        await linked(made)
        published = await made.publish()
        follower, _ = made.workers[0]
        assert root_of((await follower.wait_newer(-1)).weights) == published.manifest.state_root
        assert made.world.url not in follower.received
        client = made.clients[ANNA.key_id]
        assert await client.blob(digest_of(CONFIG_JSON)) == CONFIG_JSON
        with pytest.raises(RemoteError, match="serves no chunks"):
            await client.blob(published.manifest.encodings[0].parts[0].digest)


async def test_a_poisoned_peer_is_blamed_and_left_and_the_others_complete(tmp_path: Path) -> None:
    async with swarm(tmp_path, ANNA) as made:
        await linked(made)
        published = await made.publish()
        await made.workers[0][0].wait_newer(-1)
        for path in (tmp_path / ANNA.key_id[-8:] / "checkpoints" / "parts").iterdir():
            data = bytearray(path.read_bytes())
            for place in range(0, len(data), 1_000):
                data[place] ^= 1
            path.write_bytes(data)
        follower, peer = await made.worker(BEN)
        assert root_of((await follower.wait_newer(-1)).weights) == published.manifest.state_root
        assert peer.neighbours is not None
        assert set(peer.neighbours.blocklist) <= {ANNA.key_id}
        _, honest = await made.worker(CORA)
        follower = made.workers[-1][0]
        assert root_of((await follower.wait_newer(-1)).weights) == published.manifest.state_root
        assert honest.neighbours is not None
        assert set(honest.neighbours.blocklist) <= {ANNA.key_id}
        assert {*peer.neighbours.blocklist, *honest.neighbours.blocklist} == {ANNA.key_id}


async def test_a_private_worker_gets_everything_and_serves_no_peer(tmp_path: Path) -> None:
    async with swarm(tmp_path, ANNA) as made:
        follower, peer = await made.worker(BEN, private=True)
        await linked(made)
        published = await made.publish()
        assert root_of((await follower.wait_newer(-1)).weights) == published.manifest.state_root
        assert peer.port is None
        assert peer.describe().endswith("private")
        _, anna = made.workers[0]
        assert BEN.key_id not in anna.directory.records


async def test_a_peer_that_serves_when_idle_refuses_while_it_fetches_or_its_cores_are_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = [0.0]
    monkeypatch.setattr("prime_node.cli.wire_swarm.os.getloadavg", lambda: (load[0], 0.0, 0.0))
    monkeypatch.setattr("prime_node.cli.wire_swarm.os.cpu_count", lambda: 4)
    async with swarm(tmp_path) as made:
        follower, peer = await made.worker(ANNA, serve="idle")

        async def is_served() -> bool:
            try:
                (await peer.service.uplink.slot(BEN.key_id, 1, is_member=True))()
            except RemoteError:
                return False
            return True

        assert await is_served()
        (origin,) = follower.pool.lasting
        origin.fetching += 1
        assert not await is_served()
        origin.fetching -= 1
        load[0] = 2.5
        assert not await is_served()
        load[0] = 1.9
        assert await is_served()


async def test_a_worker_without_the_coordinator_learns_of_new_policies_from_its_peers(tmp_path: Path) -> None:
    async with swarm(tmp_path, ANNA, BEN) as made:
        await linked(made)
        await made.publish()
        follower, peer = made.workers[1]
        await follower.wait_newer(-1)
        made.clients[BEN.key_id].url = NOWHERE
        published = await made.publish()
        async with asyncio.timeout(20):
            assert root_of((await follower.wait_newer(0)).weights) == published.manifest.state_root
        peer.directory.records.clear()
        await until(lambda: set(peer.directory.records) == {ANNA.key_id, made.seeder.service.key.key_id})


async def test_a_peer_can_be_verified_as_a_coordinator_can(tmp_path: Path) -> None:
    async with swarm(tmp_path, ANNA) as made:
        await linked(made)
        await made.publish()
        published = await made.publish(delta=True)
        follower, peer = made.workers[0]
        await until(lambda: follower.versions()[-1:] == (1,))
        async with wire.public_source(f"http://127.0.0.1:{peer.port}/#{made.world.run.digest}") as source:
            report = await audit(source, made.world.run.digest)
        assert report.passed, report.checks[-1]
        assert report.policy_version == published.manifest.policy_version


async def test_a_small_delta_goes_down_the_tree_of_many_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_are_many = functools.partial(TopologyRules, tree_bytes_max=2**20, tree_peers_min=4)
    monkeypatch.setattr("prime_node.broadcast.swarm.topology.TopologyRules", few_are_many)
    keys = [SigningKey(bytes([200 + number]) * 32) for number in range(5)]
    async with swarm(tmp_path) as made:
        for key in keys:
            await made.worker(key, neighbours_max=3)
        for _, peer in made.workers:
            await until(lambda peer=peer: len(peer.directory.records) == 5 and len(peer.neighbours.linked) >= 3)
        await made.publish()
        for follower, _ in made.workers:
            await follower.wait_newer(-1)
        asked = made.chunks.num_bytes
        published = await made.publish(delta=True)
        size = published.manifest.encodings[0].sent_bytes
        for follower, peer in made.workers:
            assert root_of((await follower.wait_newer(0)).weights) == published.manifest.state_root
            assert peer.neighbours is not None
            above = parents(peer.directory.me, peer.directory.records, made.world.run.digest, TopologyRules())
            assert peer.neighbours.parents(size) == (frozenset(above) or None)
        assert made.chunks.num_bytes - asked < len(keys) * size
