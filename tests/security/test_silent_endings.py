"""A bug in the swarm is logged and reported to the owner, and does not end the swarm."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from tests.node.coordinator_world import ANNA, BEN, memory_parts, running
from tests.node.coordinator_world import make_run as make_coordinators_run
from tests.node.mesh_world import RUN, Finder, where
from tests.node.swarm_world import swarm
from tests.time_world import until

from prime_lab.memory_network import MemoryNetwork, MemorySwitch
from prime_node.adapters.peers import faults
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.adapters.web.http_peer import HttpPeer
from prime_node.broadcast.swarm.directory import Directory
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.mesh import Mesh
from prime_node.broadcast.swarm.neighbours import Neighbours
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.peer import Peer
from prime_node.broadcast.swarm.serving import PeerService
from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.ports.peer_network import PeerAddress
from prime_node.ports.transport import Unreachable
from prime_protocol.errors import RemoteError
from prime_protocol.identity import PublicKey
from prime_protocol.peers import PeerUpdate


async def test_a_bug_among_the_links_starts_them_again_and_shows_where_the_owner_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right, calls = Neighbours.link_more, 0

    def wrong_twice(self: Neighbours) -> None:
        nonlocal calls
        calls += 1
        if calls <= 2:
            raise KeyError("a bug of ours\x1b[31m")
        right(self)

    monkeypatch.setattr(Neighbours, "link_more", wrong_twice)
    async with swarm(tmp_path, ANNA) as made:
        [(follower, peer)] = made.workers
        assert peer.neighbours is not None
        neighbours = peer.neighbours
        await until(lambda: neighbours.linked)
        shown = peer.describe()
        assert "2 errors in the swarm" in shown
        assert "KeyError" in shown
        assert "\x1b" not in shown
        await made.publish()
        await follower.wait_newer(-1)
    errors = [
        record for record in caplog.records if record.levelno == logging.ERROR and "links to peers" in record.message
    ]
    assert len(errors) == 2
    assert all(record.exc_info for record in errors)


async def test_a_bug_in_one_link_is_loud_and_costs_that_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = HttpPeer.updates, 0

    async def wrong_once(self: HttpPeer) -> AsyncIterator[PeerUpdate]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise ZeroDivisionError
        async for update in right(self):
            yield update

    monkeypatch.setattr(HttpPeer, "updates", wrong_once)
    async with swarm(tmp_path, ANNA) as made:
        [(_, peer)] = made.workers
        assert peer.neighbours is not None
        neighbours = peer.neighbours
        await until(lambda: neighbours.linked)
        assert peer.swarm_tasks.num_faults == 1
        assert "ZeroDivisionError" in peer.describe()


async def test_a_peer_network_that_ends_by_a_bug_is_opened_again_and_the_rest_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, rng, switch = SystemClock(), random.Random(1), MemorySwitch()
    finder = Finder(peers=(where(BEN),))
    network, ben = (MemoryNetwork(switch, key.key_id, run=RUN.digest) for key in (ANNA, BEN))
    await ben.start()
    directory = Directory(RUN, ANNA, finder, clock=clock, rng=rng)
    parts = PartStore(tmp_path / "parts", bytes_max=2**20)
    service = PeerService(RUN, ANNA, HaveSet(), parts, Uplink(clock=clock), clock, lambda version: None)
    mesh = Mesh(RUN, network, directory, clock=clock, rng=rng)
    peer = Peer(SwarmConfig(private=True), service, AiohttpServer(), directory, SwarmTasks(clock), None, network, mesh)
    async with peer.running():
        await until(network.connected)
        await network.fail()
        assert network.connected() == ()
        await until(network.connected)
        assert "1 error in the swarm" in peer.describe()
    assert "the peer network restarts" in caplog.text


async def test_a_libp2p_host_whose_thread_ends_is_opened_again() -> None:
    pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")
    from prime_node.adapters.peers.libp2p_host import PeerSettings
    from prime_node.adapters.peers.libp2p_network import Libp2pNetwork

    settings = PeerSettings(listen=("/ip4/127.0.0.1/tcp/0",))
    anna, ben = (Libp2pNetwork(key, run=RUN.digest, settings=settings) for key in (ANNA, BEN))
    await anna.start()
    await ben.start()

    async def crash() -> None:
        raise RuntimeError("a bug in a library")

    anna.thread.spawn(crash)
    await anna.ended()
    assert anna.has_ended()
    with pytest.raises(Unreachable):
        await anna.connect(PeerAddress(ben.peer_id, ben.addresses()))
    await anna.start()
    assert not anna.has_ended()
    assert (await anna.connect(PeerAddress(ben.peer_id, ben.addresses()))).is_direct
    await anna.close()
    await ben.close()


async def test_the_coordinators_host_is_opened_again_and_its_faults_are_in_the_metrics() -> None:
    run = make_coordinators_run()
    network = MemoryNetwork(MemorySwitch(), "coordinator", run=run.digest)
    parts = dataclasses.replace(memory_parts(run), network=network)
    async with running(parts) as world:
        await network.fail()

        async def is_told() -> bool:
            return b"prime_p2p_host_faults 1.0" in (await world.get("/metrics"))[1]

        await world.until(is_told)
        await until(lambda: not network.has_ended())


async def test_a_part_that_ends_without_an_error_is_a_fault_as_well() -> None:
    swarm_tasks, done = SwarmTasks(SystemClock()), asyncio.Event()

    async def work() -> None:
        if swarm_tasks.num_faults:
            done.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(swarm_tasks.keep("links", work))
    async with asyncio.timeout(5):
        await done.wait()
    task.cancel()
    assert "must never end" in swarm_tasks.describe()


def test_a_bug_at_the_edge_to_libp2p_is_loud_once_a_place_and_a_peers_failure_is_quiet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    log = logging.getLogger("prime_node.test")

    def fail(kind: type[Exception], cause: Exception | None = None) -> Exception:
        try:
            raise kind("it") from cause
        except kind as error:
            return error

    for _ in range(3):
        faults.note(log, "dialling", fail(AttributeError))
        faults.note(log, "dialling", fail(OSError))
        faults.note(log, "dialling", ExceptionGroup("nursery", [fail(ConnectionError)]))
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(loud) == 1
    assert loud[0].exc_info
    faults.note(log, "dialling", ExceptionGroup("nursery", [fail(OSError, cause=NameError("hidden in a cause"))]))
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) == 2


def test_an_error_of_our_own_code_at_the_edge_to_libp2p_is_loud_unless_its_kind_means_a_peer_or_the_network(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("prime_node.test")

    def raised(call: Callable[[], object]) -> Exception:
        try:
            call()
        except (ValueError, RemoteError) as error:
            return error
        raise AssertionError("nothing was raised")

    faults.note(log, "reading", raised(lambda: int("a peer's word")))  # as libp2p raises it
    faults.note(log, "reading", raised(lambda: PublicKey.from_key_id("no key")))
    assert not caplog.records
    faults.note(log, "reading", raised(lambda: PeerAddress.parse("no address")))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
