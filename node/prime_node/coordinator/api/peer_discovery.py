"""Peer discovery: the client announces itself, and gets a signed list of other peers and a ticket. SPEC, "Peers over HTTP".

members (active workers, the run's keys, the operator's seeders)   get a ticket and a list, and are listed
other keys ("guests"), in a run that any key may join              get a list and no ticket; listed in a bounded share
other keys, in a run for invited or listed workers                 NOT_INVITED
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from prime_node.coordinator.api.admission import joining_rules
from prime_node.coordinator.api.callers import HEADER, HOPS_MAX, Networks, is_in, without_port
from prime_node.coordinator.api.requests import sender_of
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.decisions import Decisions
from prime_node.coordinator.listed_peers import Peers
from prime_node.ports.clock import Clock
from prime_node.ports.web import Request
from prime_protocol.addresses import parse_ip
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.peers import PeerList, PeerRecord, PeerTicket
from prime_protocol.replies import PeersReply
from prime_protocol.requests import PeersRequest
from prime_protocol.run_spec import PinnedRun

TICKET_S = 24 * 3_600.0
"""Lifetime of a ticket. Long, so that the swarm works without the coordinator; a banned key gets no new one."""


@dataclass(slots=True)
class PeerDiscovery:
    """Discovery of peers that serve checkpoints."""

    run: PinnedRun
    key: SigningKey
    config: CoordinatorConfig
    clock: Clock
    decisions: Decisions
    peers: Peers

    async def find_peers(self, signer: str, request: PeersRequest, http: Request) -> PeersReply:
        """Answer a verified request. Raise RemoteError."""
        address = announced_from(self.config.behind, http)
        is_guest = (
            signer not in self.config.seeders and sender_of(signer, run=self.run, state=self.decisions.state) is None
        )
        is_closed = self.config.allowed_workers or joining_rules(self.decisions.state, self.config).invites_needed
        if is_guest and is_closed:
            raise RemoteError(
                ErrorCode.NOT_INVITED,
                (
                    "this run lists its peers only to members: join it first; for a seeder, ask the operator to add key "
                    f"{signer} to coordinator.seeders and restart the coordinator"
                ),
            )
        now_s, now_ms = self.clock.monotonic_s(), self.clock.now_ms()
        record = PeerRecord(peer=signer, urls=_urls(address, request.port), addresses=request.addresses)
        reachable = None
        if record.urls or record.addresses:
            reachable = self.peers.offer(
                record,
                now_s,
                seen_at=address,
                offers_max=self.run.spec.limits.workers_max,
                is_trusted=signer in self.run.keys.current.trainer,
                is_guest=is_guest,
            )
        else:
            self.peers.withdraw(signer)
        listed = PeerList(
            run=self.run.digest,
            issued_at_ms=now_ms,
            peers=self.peers.sample(signer, request.peers_max, now_s, random.Random(), address=address),
        )
        return PeersReply(
            peers=seal(listed, PayloadType.PEER_LIST, self.key).to_bytes().decode(),
            ticket="" if is_guest else self._ticket(signer, now_ms),
            reachable=reachable,
        )

    def _ticket(self, peer: str, now_ms: int) -> str:
        ticket = PeerTicket(run=self.run.digest, peer=peer, expires_at_ms=now_ms + round(TICKET_S * 1_000))
        return seal(ticket, PayloadType.PEER_TICKET, self.key).to_bytes().decode()


def announced_from(proxies: Networks, request: Request) -> str:
    """Return the IP address that an announcement comes from.

    It is empty behind a reverse proxy that the settings do not name, because that address is not the client's. Then no
    dial-back happens.
    """
    hops = [without_port(hop.strip()) for hop in request.headers.get(HEADER, "").split(",")[-HOPS_MAX:]]
    while hops and is_in(hops[-1], proxies):
        hops.pop()
    is_direct = HEADER not in request.headers
    return request.remote if is_direct or hops[-1:] == [request.remote] else ""


def _urls(address: str, port: int | None) -> tuple[str, ...]:
    """Return the client's URL if it serves; empty if its address is not an IP address, such as a socket file."""
    parsed = parse_ip(address)
    if port is None or parsed is None:
        return ()
    return (f"http://[{parsed}]:{port}" if parsed.version == 6 else f"http://{parsed}:{port}",)
