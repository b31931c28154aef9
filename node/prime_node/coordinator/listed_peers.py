"""Peers that serve checkpoints, and which of them a client gets. Soft state: peers repeat their announcements.

An address is listed only after the announcing key has answered a dial-back there, over HTTP and libp2p alike. Dial-backs go
only to addresses that the announcement itself comes from. So the list can neither send a swarm to a stranger's machine nor be
used to scan one. An address outside the public internet is listed only inside the network where it was announced. A client gets
a random sample, members before guests. Guests are keys that do not take part, and have places of their own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import chain, islice

from prime_node.coordinator.api.limiter import Buckets
from prime_node.ports.peer_network import PeerNetwork
from prime_node.ports.swarm import DialBack
from prime_protocol import limits
from prime_protocol.addresses import GLOBAL, Endpoint, endpoint_of, may_be_named, network_of, parse_ip, place_of
from prime_protocol.errors import RemoteError
from prime_protocol.identity import KeyId
from prime_protocol.peers import PeerRecord

log = logging.getLogger(__name__)

OFFER_S_MAX = 180.0
"""Lifetime of an announcement that is not repeated."""
TRIED_AGAIN_S = 60.0
"""Pause before the next dial-back to an address that did not answer."""
VERIFIED_S_MAX = 600.0
"""Pause before the next dial-back to an address that answered."""


@dataclass(slots=True)
class _Verdict:
    """Result of the dial-back to one address."""

    found: bool | None = None
    """Whether the key answered; None before the first result."""
    tried_s: float = -math.inf
    is_under_way: bool = False

    def is_due(self, now_s: float) -> bool:
        pause_s = {None: 0.0, False: TRIED_AGAIN_S, True: VERIFIED_S_MAX}[self.found]
        return not self.is_under_way and now_s - self.tried_s > pause_s


@dataclass(slots=True)
class _Offer:
    record: PeerRecord
    heard_s: float
    network: str
    """Network that it counts against; empty for an address outside the public internet."""
    is_guest: bool = False
    """Whether its key does not take part in the run."""
    verdicts: dict[str, _Verdict] = field(default_factory=dict)
    """Results by address, for addresses that may be dialled back."""

    @property
    def is_listed(self) -> bool:
        return any(verdict.found for verdict in self.verdicts.values())

    @property
    def reachable(self) -> bool | None:
        """Whether the peer can be reached over HTTP; None if unknown."""
        verdict = self.verdicts.get(self.record.urls[0]) if self.record.urls else None
        return None if verdict is None else verdict.found


class Peers:
    """The announced peers."""

    def __init__(
        self,
        over_http: DialBack | None = None,
        over_libp2p: DialBack | None = None,
        network: PeerNetwork | None = None,
    ) -> None:
        """Create the list. Addresses of a transport without a dial-back are never listed.

        Every list contains the coordinator's own host in `network`, as bootstrap peer and relay, once it has an address.
        """
        self._network = network
        self._dial_backs = {"http": over_http, "libp2p": over_libp2p}
        self.offers: dict[KeyId, _Offer] = {}
        self.dials: dict[asyncio.Task[None], bool] = {}
        """Dial-backs in progress, and whether they are for guests."""
        per_minute = limits.PEER_DIAL_BACKS_PER_MINUTE_MAX
        self._rates = Buckets(per_second=per_minute / 60, burst=per_minute)

    def __len__(self) -> int:
        return sum(offer.is_listed for offer in self.offers.values())

    def counts(self) -> dict[str, int]:
        """Return the numbers of announced peers, of listed ones, of guests, and of those that keep a link to the own host."""
        return {
            "announced": len(self.offers),
            "listed": len(self),
            "guests": sum(offer.is_guest for offer in self.offers.values()),
            "linked": 0 if self._network is None else len(self._network.connected()),
        }

    def offer(
        self,
        record: PeerRecord,
        now_s: float,
        *,
        seen_at: str,
        offers_max: int,
        is_trusted: bool = False,
        is_guest: bool = False,
    ) -> bool | None:
        """Add or renew an announcement from the IP address `seen_at`. Return whether the peer is reached over HTTP, if known.

        A trusted key, such as the trainer's, may name addresses that its announcement does not come from. `offers_max` limits
        members; PEER_GUESTS_MAX limits guests.
        """
        self._forget(now_s)
        known = self.offers.get(record.peer)
        if known is not None and known.is_guest != is_guest:  # it has joined or left, and counts in the other group now
            self.withdraw(record.peer)
            known = None
        if known is None:
            network = _network_of(seen_at)
            if not (
                is_trusted or self._has_room(network, limits.PEER_GUESTS_MAX if is_guest else offers_max, is_guest)
            ):
                return None
            known = self.offers[record.peer] = _Offer(record, now_s, network, is_guest)
        known.record, known.heard_s = record, now_s
        hosts = {seen_at, *(self._link_hosts(record.peer) or ())}
        own = {parsed for host in hosts if (parsed := parse_ip(host)) is not None}
        allowed = [
            address
            for address in (*record.urls, *record.addresses)
            if (found := endpoint_of(address)) is not None
            and not found.relay
            and place_of(found.host) is not None
            and (is_trusted or parse_ip(found.host) in own)
        ]
        known.verdicts = {address: known.verdicts.get(address) or _Verdict() for address in allowed}
        for address, verdict in known.verdicts.items():
            if verdict.is_due(now_s):
                self._try(known, address, verdict, now_s)
        return known.reachable

    def withdraw(self, peer: KeyId) -> None:
        """Remove a peer's announcement."""
        self.offers.pop(peer, None)

    def sample(
        self, asker: KeyId, peers_max: int, now_s: float, rng: random.Random, *, address: str
    ) -> tuple[PeerRecord, ...]:
        """Return some peers that can be reached from the client's IP address.

        They are the coordinator's own host, if it has one, members in random order, and then a few guests if there is room.
        """
        self._forget(now_s)
        own = None
        if self._network is not None:
            own = PeerRecord(peer=self._network.peer_id, addresses=_named(self._network.addresses(), address))
        first = (own,) if own is not None and own.addresses else ()
        members = [offer for peer, offer in self.offers.items() if peer != asker and not offer.is_guest]
        guests = [offer for peer, offer in self.offers.items() if peer != asker and offer.is_guest]
        rng.shuffle(members)
        rng.shuffle(guests)
        # Lazily: to work out what is shown of an offer costs more than all else here.
        chosen = (shown for offer in members if (shown := self._shown(offer, address, own)) is not None)
        strange = (shown for offer in guests if (shown := self._shown(offer, address, own)) is not None)
        listed = chain(first, islice(chosen, peers_max), islice(strange, limits.PEER_GUESTS_LISTED_MAX))
        return tuple(islice(listed, peers_max))

    def _shown(self, offer: _Offer, asker: str, relay: PeerRecord | None) -> PeerRecord | None:
        """Return a peer as listed for a client: its verified addresses, and those over our own relay while it is connected."""
        verified = [address for address, verdict in offer.verdicts.items() if verdict.found]
        urls = _named([address for address in offer.record.urls if address in verified], asker)
        addresses = _named([address for address in offer.record.addresses if address in verified], asker)
        if relay is not None and self._link_hosts(offer.record.peer) is not None:
            circuits = {f"{address}/p2p/{relay.peer}/p2p-circuit" for address in relay.addresses}
            addresses += tuple(address for address in offer.record.addresses if address in circuits)
        if not (urls or addresses):
            return None
        return PeerRecord(peer=offer.record.peer, urls=urls, addresses=addresses)

    def _link_hosts(self, peer: KeyId) -> Collection[str] | None:
        """Return the IP addresses of a peer's direct connections to the own host; None if it is not connected."""
        link = None if self._network is None else self._network.link_to(peer)
        return None if link is None else link.hosts

    def _has_room(self, network: str, offers_max: int, is_guest: bool) -> bool:
        """Return whether there is room for one more announcement, after removing one that never answered if necessary.

        One network may not take all places. Guests of one network have a quarter of the guests' places, and none of the
        members'.
        """
        alike = {peer: offer for peer, offer in self.offers.items() if offer.is_guest == is_guest}
        of_network = sum(offer.network == network for offer in alike.values())
        if network and of_network >= (offers_max // 4 if is_guest else limits.PEER_OFFERS_PER_NETWORK_MAX):
            return False
        if len(alike) >= offers_max:
            given_up = next((peer for peer, offer in alike.items() if not offer.is_listed), None)
            if given_up is None:
                return False
            self.withdraw(given_up)
        return True

    def _forget(self, now_s: float) -> None:
        for peer in [peer for peer, offer in self.offers.items() if now_s - offer.heard_s > OFFER_S_MAX]:
            self.withdraw(peer)

    def _try(self, offer: _Offer, address: str, verdict: _Verdict, now_s: float) -> None:
        dial_back = self._dial_backs["http" if address.startswith("http://") else "libp2p"]
        if dial_back is None or len(self.dials) >= limits.DIAL_BACKS_MAX:
            return
        if offer.is_guest and sum(self.dials.values()) >= limits.DIAL_BACKS_MAX // 4:
            return
        if offer.network:
            try:
                self._rates.require(offer.network, now_s)
            except RemoteError:
                return  # tried again with the next announcement
            self._rates.charge(offer.network, now_s)
        verdict.tried_s, verdict.is_under_way = now_s, True
        task = asyncio.create_task(self._dial(offer.record.peer, address, verdict, dial_back))
        self.dials[task] = offer.is_guest
        task.add_done_callback(self.dials.pop)

    async def _dial(self, peer: KeyId, address: str, verdict: _Verdict, dial_back: DialBack) -> None:
        try:
            verdict.found = await dial_back.answers(address, peer)
        except Exception:
            verdict.found = False
            log.exception(
                "dialling %s back at %s failed with an error of this program: the address is not listed", peer, address
            )
        finally:
            verdict.is_under_way = False
        if not verdict.found:
            log.info("dialling %s back at %s got no answer: the address is not listed", peer, address)


def _named(addresses: Collection[str], asker: str) -> tuple[str, ...]:
    """Return the addresses that lead to the same machine for the client."""
    found: list[tuple[str, Endpoint | None]] = [(address, endpoint_of(address)) for address in addresses]
    return tuple(one for one, end in found if end is not None and may_be_named(end.host, between=(asker,)))


def _network_of(address: str) -> str:
    """Return the network of a public address; empty for others, because peers there can dial their neighbours themselves."""
    return network_of(address) if place_of(address) == GLOBAL else ""
