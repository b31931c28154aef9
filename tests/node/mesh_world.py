"""Shared parts of the tests of meshes: a coordinator that knows peers, and their records."""

from __future__ import annotations

from dataclasses import dataclass

from tests.node.coordinator_world import COORDINATOR, make_run

from prime_lab.memory_network import memory_address
from prime_node.ports.transport import Unreachable
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.identity import SigningKey
from prime_protocol.peers import PeerList, PeerRecord
from prime_protocol.replies import PeersReply
from prime_protocol.requests import PeersRequest

RUN = make_run()


@dataclass
class Finder:
    """Implements ports.swarm.PeerFinder: the coordinator, there or not."""

    peers: tuple[PeerRecord, ...] = ()
    is_away: bool = False
    hosts: frozenset[str] = frozenset(["127.0.0.1"])

    async def find_peers(self, request: PeersRequest) -> PeersReply:
        if self.is_away:
            raise Unreachable("nobody is there")
        listed = PeerList(run=RUN.digest, issued_at_ms=1, peers=self.peers)
        return PeersReply(peers=seal(listed, PayloadType.PEER_LIST, COORDINATOR).to_bytes().decode(), ticket="t")


def where(key: SigningKey) -> PeerRecord:
    return PeerRecord(peer=key.key_id, addresses=(memory_address(key.key_id),))
