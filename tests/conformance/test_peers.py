"""One suite for every peer network: what ports/peer_network.py promises."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.time_world import until

from prime_lab.memory_network import MemoryNetwork, MemorySwitch
from prime_node.ports.peer_network import DeferredAnswer, PeerAddress, PeerNetwork, Reachability
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId, SigningKey

ROOT = Path(__file__).resolve().parents[2]
RUN, OTHER_RUN = "a" * 64, "b" * 64
ECHO, SLOW, STRICT, BIG, COUNTED = "echo", "slow", "strict", "big", "counted"


@dataclass
class Node:
    """A peer that echoes."""

    network: PeerNetwork
    updates: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    working: int = 0
    sent: int = 0

    def __post_init__(self) -> None:
        self.network.serve(ECHO, self.echo, request_bytes_max=2**20)
        self.network.serve(SLOW, self.slow, request_bytes_max=64)
        self.network.serve(STRICT, self.strict, request_bytes_max=64)
        self.network.serve(BIG, self.big, request_bytes_max=64)
        self.network.serve(COUNTED, self.counted, request_bytes_max=64)

    async def echo(self, asker: KeyId, payload: bytes) -> bytes:
        return asker.encode() + b" " + payload

    async def slow(self, asker: KeyId, payload: bytes) -> bytes:
        self.working += 1
        self.updates.set()
        await self.go_on.wait()
        return payload

    async def strict(self, asker: KeyId, payload: bytes) -> bytes:
        raise RemoteError(ErrorCode.BAD_RANGE, "no such bytes", retry_after_s=3.0)

    async def big(self, asker: KeyId, payload: bytes) -> bytes:
        return bytes(int(payload))

    async def counted(self, asker: KeyId, payload: bytes) -> DeferredAnswer:
        return DeferredAnswer(payload, self.count)

    def count(self) -> None:
        self.sent += 1
        self.updates.set()

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(self.network.peer_id, self.network.addresses())

    async def until(self, met: Callable[[], bool]) -> None:
        while not met():
            self.updates.clear()
            await self.updates.wait()


MakeNetwork = Callable[[SigningKey, str, bool], PeerNetwork]
MakeNode = Callable[..., Awaitable[Node]]


def memory_network() -> MakeNetwork:
    switch = MemorySwitch()
    return lambda key, run, private: MemoryNetwork(switch, key.key_id, run=run, private=private)


def libp2p_network() -> MakeNetwork:
    pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")
    from prime_node.adapters.peers.libp2p_host import PeerSettings
    from prime_node.adapters.peers.libp2p_network import Libp2pNetwork

    loopback = ("/ip4/127.0.0.1/tcp/0",)
    return lambda key, run, private: Libp2pNetwork(
        key, run=run, settings=PeerSettings(listen=loopback, private=private)
    )


@pytest.fixture(params=[memory_network, libp2p_network])
async def node(request: pytest.FixtureRequest) -> AsyncIterator[MakeNode]:
    """Makes started nodes: `await node(run=..., private=...)`."""
    made: list[Node] = []
    make_network: MakeNetwork = request.param()

    async def make(*, run: str = RUN, private: bool = False) -> Node:
        key = SigningKey(bytes([len(made) + 1]) * 32)
        one = Node(make_network(key, run, private))
        made.append(one)
        await one.network.start()
        return one

    yield make
    for one in made:
        one.go_on.set()
        await one.network.close()


async def linked(node: MakeNode, count: int) -> list[Node]:
    """A line of peers: each is linked to the next."""
    nodes = [await node() for _ in range(count)]
    for left, right in itertools.pairwise(nodes):
        await left.network.connect(right.address)
    return nodes


async def both_see_a_link(one: Node, other: Node) -> None:
    """Wait until both see the link. The dialling side sees it first."""
    await until(lambda: one.network.connected() and other.network.connected())


async def reach(one: Node, other: Node) -> bytes:
    """Link, send a request, and return the answer."""
    await one.network.connect(other.address)
    return await ask(one, other, ECHO, b"hello")


async def ask(one: Node, other: Node, protocol: str, payload: bytes, *, reply_bytes_max: int = 2**21) -> bytes:
    return await one.network.request(
        other.network.peer_id, protocol, payload, timeout_s=20.0, reply_bytes_max=reply_bytes_max
    )


async def test_an_answer_comes_back_and_the_asker_is_known_by_its_key(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    assert await ask(anna, ben, ECHO, b"hello") == anna.network.peer_id.encode() + b" hello"
    assert await ask(ben, anna, ECHO, b"") == ben.network.peer_id.encode() + b" ", "a link carries both ways"


async def test_a_megabyte_comes_back_whole(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    payload = bytes(range(256)) * 4_096
    assert (await ask(anna, ben, ECHO, payload)).endswith(payload)


async def test_many_requests_are_under_way_at_once_and_a_slow_one_holds_up_no_other(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    slow = asyncio.ensure_future(ask(anna, ben, SLOW, b"slow"))
    await ben.until(lambda: ben.working == 1)
    answers = await asyncio.gather(*(ask(anna, ben, ECHO, bytes([number])) for number in range(20)))
    assert [answer[-1] for answer in answers] == list(range(20))
    ben.go_on.set()
    assert await slow == b"slow"


async def test_what_comes_after_an_answer_is_called_once(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    assert await ask(anna, ben, COUNTED, b"piece") == b"piece"
    await ben.until(lambda: ben.sent == 1)


async def test_a_peer_to_stay_linked_to_is_linked_by_itself(node: MakeNode) -> None:
    anna, ben = await node(), await node()
    anna.network.stay_linked(ben.address)
    await both_see_a_link(anna, ben)


async def test_requests_of_one_peer_are_bounded(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    slow = [asyncio.ensure_future(ask(anna, ben, SLOW, b"")) for _ in range(limits.PEER_REQUESTS_MAX)]
    await ben.until(lambda: ben.working == limits.PEER_REQUESTS_MAX)
    with pytest.raises(RemoteError) as refused:
        await ask(anna, ben, ECHO, b"one more")
    assert refused.value.code is ErrorCode.TOO_MANY_REQUESTS
    ben.go_on.set()
    await asyncio.gather(*slow)


async def test_what_a_handler_refuses_reaches_the_asker_with_its_code(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    with pytest.raises(RemoteError, match="no such bytes") as refused:
        await ask(anna, ben, STRICT, b"")
    assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.BAD_RANGE, 3.0)


async def test_an_answer_over_the_bound_is_refused_and_the_link_stays(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    assert len(await ask(anna, ben, BIG, b"1000", reply_bytes_max=1_000)) == 1_000
    with pytest.raises(RemoteError) as refused:
        await ask(anna, ben, BIG, b"1001", reply_bytes_max=1_000)
    assert refused.value.code is ErrorCode.TOO_LARGE
    assert await ask(anna, ben, BIG, b"1", reply_bytes_max=1) == b"\0"


async def test_a_request_over_the_bound_is_refused(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    with pytest.raises(RemoteError) as refused:
        await ask(anna, ben, STRICT, bytes(65))
    assert refused.value.code is ErrorCode.TOO_LARGE


async def test_a_protocol_that_no_peer_serves_is_not_found(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    with pytest.raises(RemoteError) as refused:
        await ask(anna, ben, "unheard-of", b"")
    assert refused.value.code is ErrorCode.NOT_FOUND


async def test_a_silent_handler_costs_the_asker_its_time_out_only(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    with pytest.raises(Unreachable):
        await anna.network.request(ben.network.peer_id, SLOW, b"", timeout_s=0.05, reply_bytes_max=10)
    assert (await ask(anna, ben, ECHO, b"still there")).endswith(b"still there")


async def test_without_a_link_nothing_is_asked(node: MakeNode) -> None:
    anna, ben = await node(), await node()
    with pytest.raises(Unreachable):
        await ask(anna, ben, ECHO, b"")


async def test_connecting_twice_is_one_link_that_both_see(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    link = await anna.network.connect(ben.address)
    assert link.is_direct
    await both_see_a_link(anna, ben)
    assert [link.peer for link in anna.network.connected()] == [ben.network.peer_id]
    assert anna.network.connected() == (anna.network.link_to(ben.network.peer_id),)
    assert [link.peer for link in ben.network.connected()] == [anna.network.peer_id]


async def test_a_peer_that_answers_under_another_key_is_not_accepted(node: MakeNode) -> None:
    anna, ben, carla = [await node() for _ in range(3)]
    with pytest.raises(Unreachable):
        await anna.network.connect(PeerAddress(carla.network.peer_id, ben.network.addresses()))
    assert anna.network.connected() == ()


async def test_a_peer_that_closes_is_removed_and_its_requests_end(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    slow = asyncio.ensure_future(ask(anna, ben, SLOW, b""))
    await ben.until(lambda: ben.working == 1)
    await ben.network.close()
    with pytest.raises(Unreachable):
        await slow
    with pytest.raises(Unreachable):
        await ask(anna, ben, ECHO, b"")
    with pytest.raises(Unreachable):
        await anna.network.connect(ben.address)


async def test_a_blocked_peer_loses_its_link_and_gets_no_new_one(node: MakeNode) -> None:
    anna, ben = await linked(node, 2)
    await anna.network.block(ben.network.peer_id, "sent a piece with another digest")
    assert anna.network.connected() == ()
    for one, other in ((anna, ben), (ben, anna)):
        with pytest.raises(Unreachable):
            await reach(one, other)


async def test_peers_of_different_runs_exchange_nothing(node: MakeNode) -> None:
    anna, foreign = await node(), await node(run=OTHER_RUN)
    with pytest.raises((Unreachable, RemoteError)):
        await reach(anna, foreign)


async def test_a_private_peer_asks_and_is_not_asked(node: MakeNode) -> None:
    public, private = await node(), await node(private=True)
    assert (private.network.reachability(), private.network.addresses()) == (Reachability.PRIVATE, ())
    await private.network.connect(public.address)
    assert (await ask(private, public, ECHO, b"hello")).endswith(b"hello")
    with pytest.raises(RemoteError) as refused:
        await ask(public, private, ECHO, b"hello")
    assert refused.value.code is ErrorCode.NOT_FOUND


async def test_addresses_are_remembered_and_bounded(node: MakeNode) -> None:
    anna = await node()
    addresses = tuple(PeerAddress(f"peer {number}", (f"/memory/{number}",)) for number in range(3))
    anna.network.learn((*addresses, anna.address))
    assert set(anna.network.known()) == set(addresses), "others, not itself"
    anna.network.learn(tuple(PeerAddress(f"many {n}", ("/memory/x",)) for n in range(limits.KNOWN_PEERS_MAX)))
    assert len(anna.network.known()) == limits.KNOWN_PEERS_MAX
    assert not set(addresses) & set(anna.network.known())


async def test_a_hint_leads_to_a_peer_that_is_not_linked(node: MakeNode) -> None:
    anna, _, carla = await linked(node, 3)
    hints: tuple[PeerAddress, ...] = ()
    while not hints:  # the table is filled as peers get to know each other
        await anna.network.provide("c" * 64)
        hints = await carla.network.providers("c" * 64)
    assert hints == (anna.address,)
    assert await carla.network.providers("d" * 64) == ()


def test_libp2p_is_there_wherever_it_can_be_built() -> None:
    """The tests above skip without it: that must not hide a set-up that forgot it."""
    spec = importlib.util.spec_from_file_location("setup_native", ROOT / "scripts" / "setup_native.py")
    assert spec is not None
    assert spec.loader is not None
    setup_native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup_native)
    assert importlib.util.find_spec("libp2p") or setup_native.missing_to_build()
