"""A task that fails with an error that nothing expects is seen: it is logged, counted, or raised where its result is used."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tests.node.coordinator_world import ANNA
from tests.node.mesh_world import RUN, Finder
from tests.time_world import VirtualClock, until

from prime_lab.memory_network import MemoryNetwork, MemorySwitch
from prime_node.adapters.system_clock import SystemClock
from prime_node.adapters.training.leading_backend import follow
from prime_node.adapters.web.aiohttp_server import AiohttpServer
from prime_node.broadcast.swarm.directory import Directory
from prime_node.broadcast.swarm.have_set import HaveSet
from prime_node.broadcast.swarm.neighbours import Neighbours
from prime_node.broadcast.swarm.part_store import PartStore
from prime_node.broadcast.swarm.peer import Peer
from prime_node.broadcast.swarm.serving import PeerService
from prime_node.broadcast.swarm.sources import SourcePool
from prime_node.broadcast.swarm.swarm_config import SwarmConfig
from prime_node.broadcast.swarm.swarm_tasks import SwarmTasks
from prime_node.broadcast.swarm.uplink import Uplink
from prime_node.cli.lifetime import run_role
from prime_node.cli.wire_gateway import run_of
from prime_node.coordinator.gateway.relay import LiveRelay
from prime_node.patience import Switch
from prime_node.ports.web import Response
from prime_node.ports.writer_link import ForwardedAnswer, ForwardedCall
from prime_protocol.requests import PeersRequest


async def test_a_network_that_fails_to_open_is_counted_and_opened_again(tmp_path: Path) -> None:
    opened = 0

    class Faulty(MemoryNetwork):
        async def start(self) -> None:
            nonlocal opened
            opened += 1
            if opened == 1:
                raise RuntimeError("a bug")
            await super().start()

    clock, accepted = SystemClock(), Switch()
    network = Faulty(MemorySwitch(), ANNA.key_id, run=RUN.digest)
    directory = Directory(RUN, ANNA, Finder(), clock=clock, rng=random.Random(1))
    parts = PartStore(tmp_path / "parts", bytes_max=2**20)
    service = PeerService(RUN, ANNA, HaveSet(), parts, Uplink(clock=clock), clock, lambda version: None)
    config = SwarmConfig(private=True)
    peer = Peer(config, service, AiohttpServer(), directory, SwarmTasks(clock), None, network, accepted=accepted)
    async with peer.running(), asyncio.timeout(20.0):
        accepted.turn(on=True)
        await until(lambda: opened == 2)
        assert "1 error in the swarm" in peer.describe()
        assert "a bug" in peer.describe()


async def test_a_directory_that_fails_ends_the_work_on_links_at_once() -> None:
    """However often peers call for a new look meanwhile."""

    class Faulty(Directory):
        async def run(self, links: Any = list, tell: Any = None, *, offer_of: Any = None) -> NoReturn:
            tell()
            raise RuntimeError("a bug")

    clock, rng = VirtualClock(), random.Random(1)
    neighbours = Neighbours(
        Faulty(RUN, ANNA, Finder(), clock=clock, rng=rng),
        SourcePool([], clock=clock, rng=rng),
        lambda record: None,
        Uplink(clock=clock),
        SwarmTasks(clock),
        clock=clock,
        rng=rng,
    )
    running = asyncio.ensure_future(neighbours.run(PeersRequest))
    for _ in range(20):  # turns of the loop, and no time
        await asyncio.sleep(0)
    assert running.done()
    with pytest.raises(RuntimeError, match="a bug"):
        await running


async def test_a_page_of_a_gateway_continues_after_an_answer_that_breaks_its_reader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Link:
        num_asked = 0

        async def ask(self, call: ForwardedCall) -> ForwardedAnswer:
            self.num_asked += 1
            if self.num_asked == 1:
                raise KeyError("status")  # a writer of another release

            async def frames() -> AsyncIterator[bytes]:
                yield b"id: 1\n\n"

            return ForwardedAnswer(Response(frames()))

        async def keep(self) -> None: ...

    relay = LiveRelay(Link(), VirtualClock())
    relay.enter("a network")
    async with asyncio.timeout(20.0):
        async for frame in relay.frames(0):
            if b"id: 1" in frame:
                break
    relay.leave("a network")
    assert "KeyError" in caplog.text


async def test_a_gateway_whose_link_fails_at_its_start_waits_for_nothing() -> None:
    class Broken:
        async def ask(self, call: ForwardedCall) -> ForwardedAnswer:
            await asyncio.Event().wait()
            raise AssertionError

        async def keep(self) -> None:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        async with asyncio.timeout(20.0):
            await run_of(Broken(), RUN.digest)


def test_a_part_of_a_checkpoint_that_a_follower_cannot_write_is_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    class Backend:
        def save(self) -> Any:
            def write() -> None:
                raise KeyError("a tensor")

            return write

    class Scripted:
        """Ranks that hear the calls of a list."""

        def __init__(self, *calls: Any) -> None:
            self.calls = list(calls)

        def next_call(self) -> Any:
            return self.calls.pop(0)

        def aside(self) -> Scripted:
            return Scripted(None)

    follow(Scripted(lambda ranks: Backend(), ("save", (), ()), "dismissed"))  # type: ignore[arg-type]
    assert "this rank's part of a checkpoint could not be written" in caplog.text
    assert "KeyError: 'a tensor'" in caplog.text


def test_the_end_of_a_thread_is_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)  # put back afterwards

    def fail() -> None:
        raise KeyError("a bug")

    async def main(stop: asyncio.Event) -> int:
        thread = threading.Thread(target=fail, name="helper")
        thread.start()
        await asyncio.to_thread(thread.join)
        return 0

    caplog.set_level(logging.ERROR)
    assert run_role(main, stop_with_parent=False, grace_s=1.0) == 0
    assert "the thread helper has ended" in caplog.text
    assert "KeyError: 'a bug'" in caplog.text
