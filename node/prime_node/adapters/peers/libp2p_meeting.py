"""Addresses that a relay observes for another peer's links, on the trio side. Hole punching dials only those.

A peer that wants a hole punched states itself where to dial it, so it could name a victim. The relay that both are linked to
knows better. It sends two peers each other's IP addresses once both have asked about the other, so no address is disclosed
without consent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import trio

from prime_node.adapters.peers.libp2p_relay import HostsOf, network_at
from prime_node.fair_places import has_place
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.addresses import may_be_named, parse_ip
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId

MEET = "meet"
MEET_S_MAX = 10.0
"""Seconds for which one peer waits for the other to ask."""
KEY_CHARS_MAX = 128
HOSTS_BYTES_MAX = 1_024
"""Size of an answer: IP addresses, one a line."""

Ask = Callable[[KeyId, str, bytes, float, int], Awaitable[bytes]]
"""Function (peer, protocol, request, timeout_s, reply_bytes_max) -> answer."""


@dataclass
class _Meeting:
    network: str
    """Network of the peer that asked first."""
    came: dict[KeyId, int] = field(default_factory=dict)
    """Peers that are asking, and how often."""
    both: trio.Event = field(default_factory=trio.Event)


class Meetings:
    """The relay's side."""

    def __init__(self, hosts_of: HostsOf) -> None:
        self._hosts_of = hosts_of
        self._open: dict[frozenset[KeyId], _Meeting] = {}

    async def introduce(self, asker: KeyId, payload: bytes) -> bytes:
        """Return the IP addresses of the peer that the payload names, once it asks about the asker; empty if it does not.

        Raises RemoteError(TOO_MANY_REQUESTS).
        """
        pair = frozenset((asker, payload.decode("ascii", "replace")))
        network = network_at(self._hosts_of(asker))
        num_near = sum(one.network == network for one in self._open.values())
        most, share = limits.RELAY_CIRCUITS_MAX, limits.RELAY_NETWORK_MAX
        if pair not in self._open and not has_place(num_near, len(self._open), most=most, share=share):
            raise RemoteError(
                ErrorCode.TOO_MANY_REQUESTS, "too many peers meet at this relay", retry_after_s=MEET_S_MAX
            )
        meeting = self._open.setdefault(pair, _Meeting(network))
        meeting.came[asker] = meeting.came.get(asker, 0) + 1
        if len(meeting.came) == 2:
            meeting.both.set()
        try:
            with trio.move_on_after(MEET_S_MAX):
                await meeting.both.wait()
            if not meeting.both.is_set():
                return b""
            [other] = pair - {asker}
            near = self._hosts_of(asker)
            hosts = [host for host in self._hosts_of(other) if near and may_be_named(host, between=near)]
            return "\n".join(hosts[: limits.PEER_ADDRESSES_MAX]).encode()
        finally:
            meeting.came[asker] -= 1
            if not any(meeting.came.values()):
                self._open.pop(pair, None)


async def hosts_by(relays: Iterable[KeyId], peer: KeyId, ask: Ask) -> frozenset[str]:
    """Return where a peer's links come from, according to the first of these relays that knows; empty if none does."""
    for relay in relays:
        try:
            answer = await ask(relay, MEET, peer.encode(), MEET_S_MAX + 5.0, HOSTS_BYTES_MAX)
        except (RemoteError, Unreachable):
            continue
        found = (parse_ip(line) for line in answer.decode("ascii", "replace").split("\n")[: limits.PEER_ADDRESSES_MAX])
        if hosts := frozenset(str(one) for one in found if one is not None):
            return hosts
    return frozenset()
