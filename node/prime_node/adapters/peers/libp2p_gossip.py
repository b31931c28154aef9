"""Announcements by gossipsub, on the trio side: signed by their author, validated by each peer before it forwards them.

A rejected one is blamed on the peer that forwarded it, because an honest peer validates first: after
ANNOUNCEMENTS_REJECTED_MAX of them it is blocked. A false signature counts as rejected. A late judgement blames no peer and
counts as IGNORE.

Waiting: the reader of a stream waits for each announcement's judgement, so a flood waits unread at its sender.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

import trio
from libp2p.abc import IHost, INetStream
from libp2p.io.exceptions import IncompleteReadError
from libp2p.network.connection.exceptions import RawConnError
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.pubsub.utils import maybe_consume_signed_record
from libp2p.pubsub.validators import signature_validator
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from prime_node.adapters.peers import faults
from prime_node.adapters.peers.libp2p_streams import reset
from prime_node.ports.peer_network import GossipJudgement
from prime_protocol import limits

log = logging.getLogger(__name__)

PROTOCOL = "/meshsub/1.1.0"
RPC_BYTES_MAX = 4 * limits.ANNOUNCEMENT_BYTES_MAX
JUDGED_KEPT = 1_024
MESSAGE_IDS_MAX = 64
"""Message ids taken from one control message. A run announces a policy in minutes."""
BACKOFF_S_MAX = 600

Judge = Callable[[str, bytes], Awaitable[GossipJudgement]]
Hear = Callable[[str, bytes], Awaitable[None]]
Blame = Callable[[str, str], Awaitable[None]]


class _Router(GossipSub):  # type: ignore[misc]
    """A gossipsub router that also sends outside its mesh while the mesh is not full.

    The library sends along its mesh alone. An announcement between a peer's subscription and its graft would reach no peer. It
    would not be offered again either, since the peer is in the mesh by then.
    """

    def _get_peers_to_send(
        self, topic_ids: Iterable[str], msg_forwarder: ID, origin: ID, msg_id: bytes | None = None
    ) -> Iterable[ID]:
        topics = list(topic_ids)
        chosen = set(super()._get_peers_to_send(topics, msg_forwarder, origin, msg_id))
        for topic in topics:
            in_mesh = self.mesh.get(topic, ())
            if len(in_mesh) < self.degree_low and topic in self.pubsub.peer_topics:
                chosen.update(self._get_in_topic_gossipsub_peers_from_minus(topic, self.degree, in_mesh))
        return chosen - {msg_forwarder, origin}


class GossipShares:
    """Bound of what is processed of each peer's gossip in a minute."""

    def __init__(self) -> None:
        self._minute = 0
        self._processed: Counter[str] = Counter()

    async def take(self, peer: str) -> None:
        """Take one of the peer's PEER_GOSSIP_PER_MINUTE_MAX, in the next minute if there is none left."""
        while (minute := int(trio.current_time() // 60)) == self._minute:
            if self._processed[peer] < limits.PEER_GOSSIP_PER_MINUTE_MAX:
                break
            await trio.sleep_until(60 * (minute + 1))
        if minute != self._minute:
            self._minute = minute
            self._processed.clear()
        self._processed[peer] += 1


class _Pubsub(Pubsub):  # type: ignore[misc]
    """A Pubsub that tolerates a missing stream, and processes one announcement of a stream at a time.

    The library's own ends the whole host with a KeyError if the link of a blocked peer ends meanwhile. It also starts a task
    for each announcement of an RPC, verifies all signatures, and blames no peer for false ones.
    """

    def __init__(
        self, host: IHost, router: GossipSub, reject: Callable[[str], Awaitable[None]], **settings: Any
    ) -> None:
        super().__init__(host, router, **settings)
        self._reject = reject
        self._shares = GossipShares()
        self._num_streams: Counter[ID] = Counter()

    async def stream_handler(self, stream: INetStream) -> None:
        peer = stream.muxed_conn.peer_id
        if self._num_streams[peer] >= limits.PEER_LINKS_MAX:
            await reset(stream)
            return
        self._num_streams[peer] += 1
        try:
            while self.manager.is_running and not self.is_peer_blacklisted(peer):
                await self._shares.take(str(peer))
                data = await read_varint_prefixed_bytes_limited(stream, self.max_inbound_rpc_size)
                await self._process(peer, rpc_pb2.RPC.FromString(data))
        except (StreamError, IncompleteReadError, RawConnError) as error:
            faults.note(log, f"gossip of {peer}", error)
        except Exception as error:  # noqa: BLE001 - the edge of the task: what a peer sends never ends the host
            faults.note(log, f"gossip of {peer}", error)
            self._handle_dead_peer(peer)
        finally:
            self._num_streams[peer] -= 1
            if not self._num_streams[peer]:
                del self._num_streams[peer]
            await reset(stream)

    async def _process(self, peer: ID, rpc: rpc_pb2.RPC) -> None:
        if not maybe_consume_signed_record(rpc, self.host, peer):
            return
        for message in rpc.publish:
            if self.is_peer_blacklisted(peer):
                return
            if self._is_subscribed_to_msg(message) and not self._is_msg_seen(message):
                await self._shares.take(str(peer))
                if _is_signed(message):
                    await self.push_msg(peer, message)
                else:
                    await self._reject(str(peer))
        if len(rpc.subscriptions) <= self.max_subscriptions_per_rpc:
            for subscription in rpc.subscriptions:
                self.handle_subscription(peer, subscription)
        if rpc.HasField("control"):
            kept = known_control(rpc.control, self.topic_ids)
            await self.router.handle_rpc(rpc_pb2.RPC(control=kept), peer)

    async def _teardown_if_connected(self, peer_id: ID) -> None:
        stream = self.peers.get(peer_id)
        if stream is not None:
            with contextlib.suppress(Exception):
                await stream.reset()
            self.peers.pop(peer_id, None)
        self._forget_all_subscriptions(peer_id)


def known_control(control: rpc_pb2.ControlMessage, topics: Collection[str]) -> rpc_pb2.ControlMessage:
    """Return what the library may handle of a control message: joined topics, each once, and few message ids, without repeats.

    It keeps state for every other topic, sends a message as often as it is asked for, and stores the peers of a PRUNE.
    """
    kept = rpc_pb2.ControlMessage()
    wanted = dict.fromkeys(name for one in control.iwant for name in one.messageIDs)
    if wanted:
        kept.iwant.add(messageIDs=list(wanted)[:MESSAGE_IDS_MAX])
    for kind in ("ihave", "graft", "prune"):
        first = {one.topicID: one for one in reversed(getattr(control, kind)) if one.topicID in topics}
        for topic, one in first.items():
            entry = getattr(kept, kind).add(topicID=topic)
            if kind == "ihave":
                entry.messageIDs.extend(list(dict.fromkeys(one.messageIDs))[:MESSAGE_IDS_MAX])
            elif kind == "prune":
                entry.backoff = min(one.backoff, BACKOFF_S_MAX)
    return kept


def _is_signed(message: rpc_pb2.Message) -> bool:
    try:
        signed: bool = signature_validator(message)
    except Exception as error:  # noqa: BLE001 - a key that is none
        faults.note(log, "the key of an announcement", error)
        return False
    return signed


class Gossip:
    """The topics of one host. They last as long as the host."""

    def __init__(self, host: IHost, blame: Blame) -> None:
        self.router = _Router(
            protocols=[PROTOCOL],
            degree=6,
            degree_low=4,
            degree_high=12,
            heartbeat_interval=1,
            adaptive_gossip_enabled=False,  # it would stretch the heartbeat to a minute
        )
        self.pubsub = _Pubsub(
            host,
            self.router,
            self._reject,
            strict_signing=True,
            max_inbound_rpc_size=RPC_BYTES_MAX,
            validation_timeout=2 * limits.ANNOUNCEMENT_JUDGE_S_MAX,  # ours is stricter, and blames no peer
            max_concurrent_validator_count=limits.ANNOUNCEMENTS_JUDGED_MAX,
        )
        # A restarted peer must not reuse numbers of its announcements: they would be taken for old ones.
        self.pubsub.counter = time.time_ns()
        self._rejected: Counter[str] = Counter()
        self._judged: OrderedDict[tuple[bytes, bytes], None] = OrderedDict()
        """Announcements by author and number, whose signatures the library has checked.

        The library lets a second copy through while the first is being judged.
        """
        self._blame = blame

    async def join(self, topic: str, judge: Judge, hear: Hear, nursery: trio.Nursery) -> None:
        """Subscribe to a topic, with a validator and a handler."""

        async def validate(forwarder: ID, message: Any) -> bool:
            if forwarder == self.pubsub.my_id:
                return True  # our own
            if not self._is_first(bytes(message.from_id), bytes(message.seqno)):
                return False
            return await self._judge(str(forwarder), bytes(message.data), judge) is GossipJudgement.ACCEPT

        async def listen() -> None:
            while True:
                message = await subscription.get()
                author = str(ID(message.from_id))
                if author != str(self.pubsub.my_id):
                    try:
                        await hear(author, bytes(message.data))
                    except Exception:
                        log.exception("an accepted announcement of %s could not be handled", author)

        self.pubsub.set_topic_validator(topic, validate, is_async_validator=True)
        subscription = await self.pubsub.subscribe(topic)
        nursery.start_soon(listen)

    async def announce(self, topic: str, data: bytes) -> None:
        """Publish an announcement on a topic."""
        await self.pubsub.publish(topic, data)

    def block(self, peer: ID) -> None:
        """Ignore everything from a peer."""
        self.pubsub.add_to_blacklist(peer)

    def _is_first(self, author: bytes, number: bytes) -> bool:
        if (author, number) in self._judged:
            return False
        self._judged[author, number] = None
        if len(self._judged) > JUDGED_KEPT:
            self._judged.popitem(last=False)
        return True

    async def _judge(self, forwarder: str, data: bytes, judge: Judge) -> GossipJudgement:
        judgement = GossipJudgement.IGNORE
        if len(data) > limits.ANNOUNCEMENT_BYTES_MAX:
            judgement = GossipJudgement.REJECT
        else:
            with trio.move_on_after(limits.ANNOUNCEMENT_JUDGE_S_MAX):
                try:
                    judgement = await judge(forwarder, data)
                except Exception:
                    log.exception("an announcement that %s forwarded could not be checked", forwarder)
        if judgement is GossipJudgement.REJECT:
            await self._reject(forwarder)
        return judgement

    async def _reject(self, forwarder: str) -> None:
        self._rejected[forwarder] += 1
        if self._rejected[forwarder] >= limits.ANNOUNCEMENTS_REJECTED_MAX:
            del self._rejected[forwarder]
            await self._blame(forwarder, "sent too many announcements that do not verify")
