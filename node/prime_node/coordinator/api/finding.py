"""Finding peers: the asker offers himself, and gets a signed list of others and a ticket. SPEC, "Peers over HTTP"."""

from __future__ import annotations

import ipaddress
import random

from prime_node.coordinator.core import Core
from prime_protocol.envelope import PayloadType, seal
from prime_protocol.messages import PeersReply, PeersRequest
from prime_protocol.peers import PeerList, PeerRecord, PeerTicket

TICKET_S = 24 * 3_600.0
"""Long, so that the swarm goes on without the coordinator; a banned key gets no new one."""


async def find(core: Core, signer: str, request: PeersRequest, *, address: str) -> PeersReply:
    """Answer a verified request that came from `address`."""
    now_s, now_ms = core.clock.monotonic_s(), core.clock.now_ms()
    record = PeerRecord(peer=signer, urls=_urls(address, request.port), addresses=request.addresses)
    reachable = None
    if record.urls or record.addresses:
        reachable = core.peers.offer(record, now_s, offers_max=core.run.spec.limits.workers_max)
    else:
        core.peers.withdraw(signer)
    listed = PeerList(
        run=core.run.digest,
        issued_at_ms=now_ms,
        peers=core.peers.sample(signer, request.peers_max, now_s, random.Random(), address=address),
    )
    ticket = PeerTicket(run=core.run.digest, peer=signer, expires_at_ms=now_ms + round(TICKET_S * 1_000))
    return PeersReply(
        peers=seal(listed, PayloadType.PEER_LIST, core.key).to_bytes().decode(),
        ticket=seal(ticket, PayloadType.PEER_TICKET, core.key).to_bytes().decode(),
        reachable=reachable,
    )


def _urls(address: str, port: int | None) -> tuple[str, ...]:
    """Where the asker serves, if he does. Nothing where his address is no number (a socket file, say)."""
    if port is None:
        return ()
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return ()
    if parsed.version == 6 and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return (f"http://[{parsed}]:{port}" if parsed.version == 6 else f"http://{parsed}:{port}",)
