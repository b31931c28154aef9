"""Announcements by gossipsub, on the trio side: signed by their author, validated by each peer before it forwards them.

A rejected one is blamed on the peer that forwarded it, because an honest peer validates first: after
ANNOUNCEMENTS_REJECTED_MAX of them it is blocked. A late judgement blames no peer and counts as IGNORE.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import trio
from libp2p.abc import IHost
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub

from prime_node.ports.peer_network import GossipJudgement
from prime_protocol import limits

log = logging.getLogger(__name__)

PROTOCOL = "/meshsub/1.1.0"
RPC_BYTES_MAX = 4 * limits.ANNOUNCEMENT_BYTES_MAX
JUDGED_KEPT = 1_024

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


class _Pubsub(Pubsub):  # type: ignore[misc]
    """A Pubsub that tolerates a missing stream.

    The library's own ends the whole host with a KeyError if the link of a blocked peer ends meanwhile.
    """

    async def _teardown_if_connected(self, peer_id: ID) -> None:
        stream = self.peers.get(peer_id)
        if stream is not None:
            with contextlib.suppress(Exception):
                await stream.reset()
            self.peers.pop(peer_id, None)
        self._forget_all_subscriptions(peer_id)


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
            self._rejected[forwarder] += 1
            if self._rejected[forwarder] >= limits.ANNOUNCEMENTS_REJECTED_MAX:
                del self._rejected[forwarder]
                await self._blame(forwarder, "sent too many announcements that do not verify")
        return judgement
