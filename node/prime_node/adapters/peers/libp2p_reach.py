"""Find out whether others can reach this peer, on the trio side.

Other peers are asked to dial back. A helper dials only the address that the asker's own link comes from, so it cannot be used
against a stranger. It uses a key made for the purpose, so an answer proves a new link. (The library's AutoNAT never reaches a
conclusion.) If no helper gets through, a reservation at a relay is made, and holes are punched on request.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import trio
from libp2p.abc import IHost

from prime_node.adapters.peers.libp2p_dial_back import key_answers
from prime_node.adapters.peers.libp2p_host import PeerSettings
from prime_node.adapters.peers.libp2p_nat import Holes
from prime_node.adapters.peers.libp2p_streams import Streams, leads_through_relay
from prime_node.ports.peer_network import PeerAddress, Reachability
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.addresses import endpoint_of
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId

log = logging.getLogger(__name__)

ALIVE, DIAL_BACK = "alive", "dial-back"
TEXT_BYTES_MAX = limits.PEER_ADDRESSES_MAX * (limits.PEER_ADDRESS_CHARS_MAX + 1)
"""Size of a list of addresses, one a line."""
HELPERS_MAX = 3
LOOK_S, LOOK_AGAIN_S = 1.0, 600.0
"""Seconds between checks until there is an answer, and after it."""

Ask = Callable[[KeyId, str, bytes, float, int], Awaitable[bytes]]
"""Function (peer, protocol, request, timeout_s, reply_bytes_max) -> answer."""


class Reach:
    """Reachability of one host, and its help for others."""

    def __init__(
        self,
        host: IHost,
        settings: PeerSettings,
        bootstrap: Mapping[KeyId, PeerAddress],
        streams: Streams,
        holes: Holes,
        ask: Ask,
    ) -> None:
        """Check the reachability of `host`.

        `bootstrap` may grow: its peers are asked first, and those that are relays get a reservation.
        """
        self.found = Reachability.UNKNOWN
        self.confirmed: tuple[str, ...] = ()
        """Addresses at which a helper has reached this peer."""
        self.relayed: tuple[str, ...] = ()
        """Addresses through relays with a reservation."""
        self._host = host
        self._settings = settings
        self._bootstrap = bootstrap
        self._streams = streams
        self._holes = holes
        self._ask = ask
        self._helping: set[KeyId] = set()
        self._minute = 0
        self._dialled: Counter[str] = Counter()
        """Dial-backs by address, in this minute."""

    async def look(self) -> None:
        """Check reachability, and again every ten minutes: a router may forward a port since."""
        while True:
            await self._look_once()
            await trio.sleep(LOOK_S if self.found is Reachability.UNKNOWN else LOOK_AGAIN_S)

    async def announce_addresses(self, asker: KeyId, payload: bytes) -> bytes:
        """Return the address that the asker's direct link comes from: how a peer behind a NAT learns its outer address."""
        seen = self._seen_at(asker)
        return seen[0].encode() if seen else b""

    async def dial_back(self, asker: KeyId, payload: bytes) -> bytes:
        """Dial the asker at those of the named addresses that its link comes from. Return the ones that worked."""
        hosts = {_host_of(address) for address in self._seen_at(asker)}
        wanted = [address for address in _addresses(payload) if _host_of(address) in hosts]
        if asker in self._helping or len(self._helping) >= limits.PEER_DIAL_BACKS_MAX:
            raise RemoteError(
                ErrorCode.TOO_MANY_REQUESTS,
                "a dial-back to this peer is running already",
                retry_after_s=limits.DIAL_BACK_S_MAX,
            )
        self._require_room(hosts, len(wanted))
        self._helping.add(asker)
        try:
            worked = [address for address in wanted if await key_answers(asker, address)]
        finally:
            self._helping.remove(asker)
        return "\n".join(worked).encode()

    def _require_room(self, hosts: set[str], num_dials: int) -> None:
        """Bound the dials to one IP address in a minute, for all asking keys together.

        An asker shares its address with its neighbours. Raises RemoteError(TOO_MANY_REQUESTS).
        """
        minute = int(trio.current_time() // 60)
        if minute != self._minute:
            self._minute = minute
            self._dialled.clear()
        if any(self._dialled[host] + num_dials > limits.PEER_DIAL_BACKS_PER_MINUTE_MAX for host in hosts):
            raise RemoteError(ErrorCode.TOO_MANY_REQUESTS, "too many dial-backs to your address", retry_after_s=60.0)
        for host in hosts:
            self._dialled[host] += num_dials

    def _seen_at(self, peer: KeyId) -> list[str]:
        direct = [link for link in self._streams.links(peer) if not leads_through_relay(link)]
        return [str(address).split("/p2p/")[0] for link in direct for address in link.get_transport_addresses()]

    async def _look_once(self) -> None:
        helpers = [str(peer) for peer in list(self._host.get_network().connections)]
        helpers.sort(key=lambda peer: peer not in self._bootstrap)
        answers = 0
        confirmed: set[str] = set()
        for helper in [peer for peer in helpers if self._streams.has_direct_link(peer)][:HELPERS_MAX]:
            try:
                candidates = await self._candidates(helper)
                if not candidates:
                    answers += 1  # it listens nowhere
                    continue
                asked = "\n".join(candidates).encode()
                wait_s = limits.DIAL_BACK_S_MAX * (len(candidates) + 1)
                reply = await self._ask(helper, DIAL_BACK, asked, wait_s, TEXT_BYTES_MAX)
            except (RemoteError, Unreachable) as error:
                log.debug("%s does not dial back: %s", helper, error)
                continue
            answers += 1
            confirmed.update(set(_addresses(reply)) & set(candidates))
            if confirmed:
                break
        if confirmed:
            self.confirmed, self.relayed = tuple(sorted(confirmed)), ()
            self._conclude(Reachability.PUBLIC)
        elif answers:
            self.confirmed = ()
            self.relayed = tuple([address async for address in self._places()])
            self._conclude(Reachability.RELAYED if self.relayed else Reachability.OUTBOUND)

    async def _candidates(self, helper: KeyId) -> list[str]:
        """Return where this peer might be reachable: at the address that the helper sees, on the ports that it listens on."""
        seen = (await self._ask(helper, ALIVE, b"", limits.DIAL_BACK_S_MAX, limits.PEER_ADDRESS_CHARS_MAX)).decode(
            "ascii", "replace"
        )
        host = _host_of(seen)
        ports = [str(address).rsplit("/tcp/", 1)[1] for address in self._host.get_transport_addrs()]
        kind = "ip6" if ":" in host else "ip4"
        guessed = [f"/{kind}/{host}/tcp/{port}" for port in ports] if host else []
        configured = [address for address in self._settings.announce if _host_of(address) == host]
        return list(dict.fromkeys([*configured, *guessed]))[: limits.PEER_ADDRESSES_MAX]

    async def _places(self) -> AsyncIterator[str]:
        for relay in list(self._bootstrap.values()):
            if self._streams.has_direct_link(relay.peer) and await self._holes.reserve(relay.peer):
                for address in relay.addresses[:1]:
                    yield f"{address}/p2p/{relay.peer}/p2p-circuit"

    def _conclude(self, found: Reachability) -> None:
        if found is not self.found:
            log.info("this peer is %s%s", found, f" at {', '.join(self.confirmed)}" if self.confirmed else "")
        self.found = found


def _addresses(payload: bytes) -> list[str]:
    """Return the TCP multiaddrs of a list, one a line; other lines are left out."""
    lines = payload.decode("ascii", "replace").split("\n")[: limits.PEER_ADDRESSES_MAX]
    return [line for line in lines if _host_of(line)]


def _host_of(address: str) -> str:
    """Return the IP address of a TCP multiaddr: "203.0.113.7" of "/ip4/203.0.113.7/tcp/4001", "" for anything else."""
    end = endpoint_of(address)
    return "" if end is None or end.relay else end.host


def circuits(address: PeerAddress) -> Sequence[str]:
    """Return a peer's addresses through a relay."""
    return [text for text in address.addresses if text.endswith("/p2p-circuit")]
