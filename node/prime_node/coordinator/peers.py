"""Who serves checkpoints to others, and who is told of them. Soft state: peers offer themselves again every so often.

An address counts only as the one that the offer came from, and only after a dial-back has found the offering key there: so the
list can neither send a swarm to a stranger's machine nor fill up with machines that nobody reaches. The asker gets a random
sample, and a ticket that shows other peers that his key belongs to the run.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from prime_node.ports.swarm import DialBack
from prime_protocol import limits
from prime_protocol.peers import PeerRecord

log = logging.getLogger(__name__)

OFFER_S_MAX = 180.0
"""An offer that is not repeated is forgotten."""
TRIED_AGAIN_S = 60.0
"""An address where nobody answered is tried again after this."""


@dataclass(slots=True)
class _Offer:
    record: PeerRecord
    heard_s: float
    reachable: bool | None
    """None while the dial-back is under way."""
    tried_s: float

    @property
    def nearness(self) -> int:
        """Whose networks its addresses lead to: 0 everybody's, 1 a private one's, 2 this machine's."""
        return max((_nearness(urlsplit(url).hostname or "") for url in self.record.urls), default=0)

    @property
    def shown(self) -> PeerRecord | None:
        """What others are told: of a peer that HTTP does not reach, where libp2p may."""
        if self.reachable:
            return self.record
        return self.record.model_copy(update={"urls": ()}) if self.record.addresses else None


class Peers:
    """The offers."""

    def __init__(self, dial_back: DialBack | None = None) -> None:
        self.own: Callable[[], PeerRecord | None] = lambda: None
        """The coordinator's own libp2p host, which every list names: bootstrap peer and relay."""
        self._dial_back = dial_back
        self._offers: dict[str, _Offer] = {}
        self._dials: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return sum(offer.reachable is True for offer in self._offers.values())

    def offer(self, record: PeerRecord, now_s: float, *, offers_max: int) -> bool | None:
        """Take an offer in, or up again. Returns whether its address is reachable, as far as that is known."""
        self._forget(now_s)
        known = self._offers.get(record.peer)
        if known is None and len(self._offers) >= offers_max:
            return None
        if known is not None and known.record == record:
            known.heard_s = now_s
            if known.reachable is False and now_s - known.tried_s > TRIED_AGAIN_S:
                self._try(known, now_s)
            return known.reachable
        offer = self._offers[record.peer] = _Offer(record, now_s, None, now_s)
        self._try(offer, now_s)
        return offer.reachable

    def withdraw(self, peer: str) -> None:
        self._offers.pop(peer, None)

    def sample(
        self, asker: str, peers_max: int, now_s: float, rng: random.Random, *, address: str = "127.0.0.1"
    ) -> tuple[PeerRecord, ...]:
        """Some that can be reached from the asker's address, in random order; before them the coordinator's own host, where it
        has one."""
        self._forget(now_s)
        near = _nearness(address)
        found = [
            offer.shown
            for peer, offer in self._offers.items()
            if offer.shown is not None and peer != asker and (offer.nearness <= near or not offer.shown.urls)
        ]
        own = self.own()
        first = () if own is None else (own,)
        return (*first, *rng.sample(found, min(peers_max, len(found))))[:peers_max]

    def _forget(self, now_s: float) -> None:
        for peer in [peer for peer, offer in self._offers.items() if now_s - offer.heard_s > OFFER_S_MAX]:
            del self._offers[peer]

    def _try(self, offer: _Offer, now_s: float) -> None:
        offer.tried_s = now_s
        if self._dial_back is None or not offer.record.urls:
            offer.reachable = True  # libp2p finds out by itself who is reachable
        elif len(self._dials) < limits.DIAL_BACKS_MAX:
            offer.reachable = None
            task = asyncio.create_task(self._dial(offer, self._dial_back))
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)

    async def _dial(self, offer: _Offer, dial_back: DialBack) -> None:
        offer.reachable = await dial_back.answers(offer.record.urls[0], offer.record.peer)
        if not offer.reachable:
            log.info("nobody answers for %s at %s: this is not listed", offer.record.peer, offer.record.urls[0])


def _nearness(address: str) -> int:
    """An address of this machine leads to it from nowhere else, one of a private network only from there."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return 0
    return 2 if parsed.is_loopback else int(parsed.is_private)
