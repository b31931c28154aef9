"""Workers without HTTP access exchange policies over libp2p, and learn of new heads from each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.time_world import until

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

from tests.node.coordinator_world import COORDINATOR, TRAINER, make_run
from tests.node.swarm_world import ANNA, BEN, LOCAL, from_peers, swarm

from prime_node.adapters.peers.libp2p_dial_back import Libp2pDialBack
from prime_node.adapters.peers.libp2p_host import PeerSettings
from prime_node.adapters.peers.libp2p_network import Libp2pNetwork
from prime_node.ports.peer_network import Reachability
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.weights import root_of

LISTEN = ("/ip4/127.0.0.1/tcp/0",)
OVER_LIBP2P = LOCAL.model_copy(update={"p2p": "on", "p2p_listen": LISTEN})


class NobodyAnswers:
    """Dial-back that fails, as for every host behind a home router."""

    async def answers(self, address: str, peer: KeyId) -> bool:
        return False

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MIN", 0.05)
    monkeypatch.setattr("prime_node.broadcast.swarm.directory.ASK_S_MAX", 0.2)


async def test_peers_that_http_does_not_reach_exchange_policies_over_libp2p(tmp_path: Path) -> None:
    run = make_run()
    host = Libp2pNetwork(COORDINATOR, run=run.digest, settings=PeerSettings(listen=LISTEN, relay=True))
    async with swarm(
        tmp_path, seeder=OVER_LIBP2P, dial_back=NobodyAnswers(), dial_back_libp2p=Libp2pDialBack(), network=host
    ) as made:
        workers = [await made.worker(key, p2p="on", p2p_listen=LISTEN) for key in (ANNA, BEN)]
        for _, peer in workers:
            network, neighbours = peer.network, peer.neighbours
            assert network is not None
            assert neighbours is not None
            await until(lambda network=network: network.reachability() is Reachability.PUBLIC)
            await until(lambda neighbours=neighbours: len(neighbours.linked) == 2)
        made.chunks.is_cut = True
        for version in (0, 1):
            published = await made.publish(delta=version == 1)
            async with asyncio.timeout(20):
                for follower, _ in workers:
                    assert root_of((await follower.wait_newer(version - 1)).weights) == published.manifest.state_root
        assert all(from_peers(follower, made.world.url) > 0 for follower, _ in workers)


async def test_a_new_head_spreads_from_peer_to_peer_after_the_coordinator_has_ended(tmp_path: Path) -> None:
    """One worker is linked to the trainer's peer, the other to that worker alone, over libp2p."""
    run = make_run()
    host = Libp2pNetwork(COORDINATOR, run=run.digest, settings=PeerSettings(listen=LISTEN, relay=True))
    async with swarm(
        tmp_path, seeder=OVER_LIBP2P, dial_back=NobodyAnswers(), dial_back_libp2p=Libp2pDialBack(), network=host
    ) as made:
        (anna, anna_peer), (ben, ben_peer) = [
            await made.worker(key, p2p="on", p2p_listen=LISTEN) for key in (ANNA, BEN)
        ]
        neighbours, others = anna_peer.neighbours, ben_peer.neighbours
        assert neighbours is not None
        assert others is not None
        await until(lambda: {len(neighbours.linked), len(others.linked)} == {2})
        trainer = next(named for named in anna.pool.peers if named.name == TRAINER.key_id)
        neighbours.lied(trainer, RemoteError(ErrorCode.DIGEST_MISMATCH, "cut in this test"))
        await made.publish()
        for follower in (anna, ben):
            await follower.wait_newer(-1)
        published = await made.publish(delta=True, is_coordinator_lost=True)
        async with asyncio.timeout(40):
            for follower in (anna, ben):
                assert root_of((await follower.wait_newer(0)).weights) == published.manifest.state_root
        assert TRAINER.key_id not in anna.received


async def test_a_newcomer_that_knows_one_peer_joins_after_the_coordinator_has_ended(tmp_path: Path) -> None:
    """It has no ticket and no list: one bootstrap peer leads it to a policy that a second one has, too."""
    host = Libp2pNetwork(COORDINATOR, run=make_run().digest, settings=PeerSettings(listen=LISTEN, relay=True))
    async with swarm(
        tmp_path, seeder=OVER_LIBP2P, dial_back=NobodyAnswers(), dial_back_libp2p=Libp2pDialBack(), network=host
    ) as made:
        follower, peer = await made.worker(ANNA, p2p="on", p2p_listen=LISTEN)
        published = await made.publish()
        await follower.wait_newer(-1)
        await made.lose_coordinator()
        assert peer.network is not None
        known = tuple(f"{address}/p2p/{ANNA.key_id}" for address in peer.network.addresses())
        newcomer, _ = await made.worker(BEN, p2p="on", p2p_listen=LISTEN, p2p_bootstrap=known)
        async with asyncio.timeout(20):
            assert root_of((await newcomer.wait_newer(-1)).weights) == published.manifest.state_root
        assert from_peers(newcomer, made.world.url) > 0
