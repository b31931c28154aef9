"""A stranger's gossip costs a bounded amount of work, whether its announcements are signed or not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import pytest

pytest.importorskip("libp2p", reason="libp2p could not be built on this machine")

import trio
import trio.testing
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.host.exceptions import StreamFailure
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.pubsub.pb import rpc_pb2
from libp2p.tools.anyio_service import background_trio_service
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from prime_node.adapters.peers.libp2p_gossip import PROTOCOL, Gossip, GossipShares, known_control
from prime_node.adapters.peers.libp2p_host import PeerSettings, make_host
from prime_node.ports.peer_network import GossipJudgement
from prime_protocol import limits
from prime_protocol.identity import SigningKey

TOPIC = "heads"
AUTHOR = create_new_key_pair(bytes([7]) * 32)


def test_control_messages_are_cut_to_joined_topics_and_few_ids() -> None:
    """Before, each made-up topic was kept, each repeated id was answered, and peers of a PRUNE were stored."""
    control = rpc_pb2.ControlMessage()
    for number in range(1_000):
        for topic in (TOPIC, f"made up {number}"):
            control.graft.add(topicID=topic)
            control.prune.add(topicID=topic, backoff=10**9).peers.add(peerID=b"%d" % number)
            control.ihave.add(topicID=topic, messageIDs=[b"%d" % number, b"%d" % number])
        control.iwant.add(messageIDs=[b"same", b"%d" % number, b"same"])
    kept = known_control(control, {TOPIC})
    assert [[one.topicID for one in found] for found in (kept.graft, kept.prune, kept.ihave)] == [[TOPIC]] * 3
    assert list(kept.prune[0].peers) == []
    assert kept.prune[0].backoff <= 600
    assert list(kept.ihave[0].messageIDs) == [b"0"]
    assert len(kept.iwant) == 1
    assert len(set(kept.iwant[0].messageIDs)) == len(kept.iwant[0].messageIDs) == 64


def test_a_host_keeps_its_own_keys_however_many_peers_it_meets() -> None:
    """Before, the thousandth peer evicted the host's own entry, and its announcements failed."""
    key = SigningKey(bytes([3]) * 32)
    host = make_host(key, PeerSettings(connections_max=64))
    store = host.get_peerstore()
    for number in range(5_000):
        store.add_addrs(ID(b"\x00\x24" + number.to_bytes(36, "big")), [], 7_200)
    assert len(store.peer_ids()) < 5_000
    assert ID.from_pubkey(store.privkey(host.get_id()).get_public_key()) == host.get_id()


def on_trio(talk: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with trio.fail_after(20):
            await talk()

    trio.run(bounded)


def announced(number: int, *, signed: bool) -> rpc_pb2.Message:
    author = ID.from_pubkey(AUTHOR.public_key).to_bytes()
    message = rpc_pb2.Message(from_id=author, seqno=number.to_bytes(8, "big"), data=b"%d" % number, topicIDs=[TOPIC])
    text = b"libp2p-pubsub:" + message.SerializeToString()
    message.signature = AUTHOR.private_key.sign(text) if signed else bytes(64)
    message.key = AUTHOR.public_key.serialize()
    return message


@dataclass
class Heard:
    judged: list[bytes] = field(default_factory=list)
    judging_most: int = 0
    blamed: trio.Event = field(default_factory=trio.Event)


@asynccontextmanager
async def gossiping(heard: Heard) -> AsyncIterator[Callable[[], Awaitable[INetStream]]]:
    """A host of ours that takes part in one topic. Yields what opens a stranger's stream to it."""
    judging = 0

    async def judge(forwarder: str, data: bytes) -> GossipJudgement:
        nonlocal judging
        judging += 1
        heard.judging_most = max(heard.judging_most, judging)
        for _ in range(20):
            await trio.lowlevel.checkpoint()
        judging -= 1
        heard.judged.append(data)
        return GossipJudgement.IGNORE

    async def hear(author: str, data: bytes) -> None:
        raise AssertionError(f"{data!r} was ignored")

    async def blame(peer: str, why: str) -> None:
        gossip.block(ID.from_string(peer))
        heard.blamed.set()

    ours, stranger = make_host(SigningKey(bytes([1]) * 32), PeerSettings()), new_host()
    gossip = Gossip(ours, blame)
    async with (
        ours.run([Multiaddr("/ip4/127.0.0.1/tcp/0")]),
        stranger.run([]),
        background_trio_service(gossip.pubsub),
        background_trio_service(gossip.router),
        trio.open_nursery() as nursery,
    ):
        await gossip.pubsub.wait_until_ready()
        await gossip.join(TOPIC, judge, hear, nursery)
        await stranger.connect(PeerInfo(ours.get_id(), ours.get_transport_addrs()))
        yield lambda: stranger.new_stream(ours.get_id(), [PROTOCOL])
        for one, other in ((stranger, ours), (ours, stranger)):
            await one.get_network().close_peer(other.get_id())
        nursery.cancel_scope.cancel()


async def send(stream: INetStream, messages: list[rpc_pb2.Message]) -> None:
    await stream.write(encode_varint_prefixed(rpc_pb2.RPC(publish=messages).SerializeToString()))


def test_false_signatures_are_blamed_on_the_peer_that_sends_them() -> None:
    async def talk() -> None:
        heard = Heard()
        async with gossiping(heard) as stream:
            most = limits.ANNOUNCEMENTS_REJECTED_MAX
            await send(await stream(), [announced(number, signed=False) for number in range(most)])
            await heard.blamed.wait()
        assert heard.judged == []

    on_trio(talk)


def test_what_follows_too_many_false_signatures_is_not_looked_at() -> None:
    async def talk() -> None:
        heard = Heard()
        async with gossiping(heard) as stream:
            most = limits.ANNOUNCEMENTS_REJECTED_MAX
            false = [announced(number, signed=False) for number in range(most)]
            opened = await stream()
            await send(opened, [announced(most, signed=True), *false, announced(most + 1, signed=True)])
            await heard.blamed.wait()
            with suppress(StreamError):  # until the stream ends
                while await opened.read(1):
                    pass
        assert heard.judged == [b"%d" % most]

    on_trio(talk)


def test_announcements_of_one_stream_are_judged_one_after_the_other() -> None:
    async def talk() -> None:
        heard = Heard()
        async with gossiping(heard) as stream:
            await send(await stream(), [announced(number, signed=True) for number in range(30)])
            while len(heard.judged) < 30:
                await trio.lowlevel.checkpoint()
        assert heard.judging_most == 1

    on_trio(talk)


def test_a_peer_has_as_many_streams_of_gossip_as_it_may_have_links() -> None:
    async def talk() -> None:
        heard = Heard()
        async with gossiping(heard) as stream:
            opened = [await stream() for _ in range(limits.PEER_LINKS_MAX)]
            with pytest.raises((StreamFailure, StreamError)):
                await (await stream()).read(1)
            for number, one in enumerate(opened):
                await send(one, [announced(number, signed=True)])
            while len(heard.judged) < limits.PEER_LINKS_MAX:
                await trio.lowlevel.checkpoint()

    on_trio(talk)


def test_the_gossip_of_one_peer_waits_for_the_next_minute_once_it_was_much_and_that_of_others_does_not() -> None:
    async def talk() -> None:
        shares, began = GossipShares(), trio.current_time()
        for _ in range(limits.PEER_GOSSIP_PER_MINUTE_MAX):
            await shares.take("busy")
        assert trio.current_time() == began
        await shares.take("quiet")
        assert trio.current_time() == began
        await shares.take("busy")
        assert began < trio.current_time() <= began + 60

    trio.run(talk, clock=trio.testing.MockClock(autojump_threshold=0))
