"""Peer discovery: the members of the run, as the coordinator lists them, directly or through peers; and our ticket.

The coordinator is asked at intervals, and gets our own address in the same request. Peers pass on the lists that it has
signed, so discovery works while the coordinator is unreachable. Then unsigned hints count too: few, and after all others. A
record only says where to look; content proves itself. A private-network address counts, and is passed on, only if it leads to
the same machine: a hostile run must not send its members to their own neighbours.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import NoReturn

from prime_node.patience import unless
from prime_node.ports.clock import Clock
from prime_node.ports.peer_network import PeerAddress
from prime_node.ports.swarm import PeerFinder, PeerLink
from prime_node.ports.transport import Unreachable
from prime_protocol import limits
from prime_protocol.addresses import endpoint_of, may_be_named
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import KeyId, SigningKey
from prime_protocol.peers import TOKEN_AGE_S_MAX, PeerList, PeerRecord, authorization, open_peer_list
from prime_protocol.requests import PeersRequest
from prime_protocol.run_spec import PinnedRun

log = logging.getLogger(__name__)

LIST_S_MAX = 10.0
"""Seconds that a peer has to send its list of peers."""
LIST_AGE_S_MAX = 24 * 3_600.0
"""Age of a list that counts if a peer shows it: as long as a ticket lasts."""

ASK_S_MIN, ASK_S_MAX = 0.5, 30.0
"""Seconds between two requests to the coordinator: short while there are changes, then doubling.

A member that is on none of our lists shortens it again. The coordinator remembers offers for longer.
"""
TICKET_KEPT_S = 120.0
"""Seconds for which a ticket is kept; tickets last a day.

A ticket older than the run's current keys is not shown, and a new one is requested at once.
"""


class Directory:
    """Discovery state of one machine. Used from the event loop only."""

    def __init__(
        self,
        run: PinnedRun,
        key: SigningKey,
        coordinator: PeerFinder,
        *,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        self.me = key.key_id
        self.run_digest = run.digest
        self.records: dict[KeyId, PeerRecord] = {}
        """Listed peers, the newest last."""
        self.hinted: dict[KeyId, PeerRecord] = {}
        """Peers that only hints name, while the coordinator is unreachable."""
        self.is_alone = False
        """Whether the coordinator did not answer last time."""
        self.reachable: bool | None = None
        """Whether the coordinator could reach us."""
        self._run = run
        self._key = key
        self._coordinator = coordinator
        self._clock = clock
        self._rng = rng
        self._ticket: str | None = None
        self._ticket_at_s = 0.0
        self._ticket_ring = 0
        """Key ring in force when the ticket came."""
        self._tokens: dict[KeyId, tuple[int, str]] = {}
        self._list: tuple[str, PeerList] | None = None
        """Newest signed list, to be passed on, as text and parsed."""
        self._hints_since_s = -limits.PEER_HINTS_S_MAX
        self._num_hints = 0
        """Hints taken since then."""
        self.members_met: set[KeyId] = set()
        """Members of the run that are on none of our lists: private ones, and newcomers."""
        self._woken = asyncio.Event()

    def met(self, peer: KeyId) -> None:
        """Record that a member of the run has contacted us.

        An unknown one may be new and serve, so the coordinator is asked soon.
        """
        if peer not in self.records and peer not in self.members_met and peer != self.me:
            if len(self.members_met) >= limits.PEER_RECORDS_MAX:
                self.members_met.clear()
            self.members_met.add(peer)
            self._woken.set()

    async def run(
        self,
        links: Callable[[], list[PeerLink]] = list,
        tell: Callable[[], None] = lambda: None,
        *,
        offer_of: Callable[[], PeersRequest] = PeersRequest,
    ) -> NoReturn:
        """Ask until cancelled.

        `tell` is called when there may be new records; `links` are asked while the coordinator is unreachable. `offer_of`
        returns our request, with the address at which we serve, if we do.
        """
        pause_s = ASK_S_MIN
        while True:
            known, offer = len(self.records), offer_of()
            try:
                reply = await self._coordinator.find_peers(offer)
                self.take_in(reply.peers)
                self.reachable = reply.reachable
                self._keep_ticket(reply.ticket)
                self.is_alone = False
                self.hinted.clear()
            except (RemoteError, Unreachable) as error:
                if not self.is_alone:  # logged once; the worker reports how long it lasts
                    is_refused = isinstance(error, RemoteError) and error.code is ErrorCode.NOT_INVITED
                    level = logging.WARNING if is_refused else logging.INFO
                    log.log(level, "the coordinator sent no list of peers: %s", error)
                self.is_alone = True
                await self._exchange(links())
            tell()
            unheard = offer.port is not None and self.reachable is None and not self.is_alone
            is_update = len(self.records) > known or unheard
            is_hopeful = is_update or not (self.records or self.is_alone)
            pause_s = ASK_S_MIN if is_hopeful else min(2 * pause_s, ASK_S_MAX)
            await unless(self._woken.wait(), self._clock.sleep(pause_s * self._rng.uniform(0.8, 1.2)))
            if self._woken.is_set():  # the coordinator dials a newcomer before it lists it
                self._woken.clear()
                pause_s = ASK_S_MIN
                await self._clock.sleep(pause_s * self._rng.uniform(0.8, 1.2))

    @property
    def candidates(self) -> dict[KeyId, PeerRecord]:
        """Peers to link to; those that the coordinator lists come before those from hints."""
        return {**self.records, **{peer: r for peer, r in self.hinted.items() if peer not in self.records}}

    def may_dial(self, address: str) -> bool:
        """Return whether a listed address leads to the internet or into the coordinator's own network."""
        end = endpoint_of(address)
        return end is not None and may_be_named(end.host, between=self._coordinator.hosts)

    def hint(self, found: Sequence[PeerAddress]) -> None:
        """Take in unsigned addresses of peers; what the coordinator says of a peer takes precedence.

        The caller has checked that the addresses may be dialled at all. At most PEER_HINTS_MAX are taken in PEER_HINTS_S_MAX.
        """
        now_s = self._clock.monotonic_s()
        if now_s - self._hints_since_s >= limits.PEER_HINTS_S_MAX:
            self._hints_since_s, self._num_hints = now_s, 0
        for address in found:
            known = self.hinted.get(address.peer)
            addresses = address.addresses[: limits.PEER_HINT_ADDRESSES_MAX]
            if address.peer == self.me or address.peer in self.records or not addresses:
                continue
            if (known is not None and known.addresses == addresses) or self._num_hints >= limits.PEER_HINTS_MAX:
                continue
            with contextlib.suppress(ValueError):  # a stranger may have written anything
                self.hinted[address.peer] = PeerRecord(peer=address.peer, addresses=addresses)
                self._num_hints += 1
        while len(self.hinted) > limits.PEER_HINTS_MAX:
            del self.hinted[next(iter(self.hinted))]

    def list_for(self, asker: str) -> str | None:
        """Return the newest list, as the coordinator signed it, for an asker at this IP address.

        Return None if there is none, or if it names an address that leads the asker elsewhere.
        """
        if self._list is None:
            return None
        text, listed = self._list
        ends = [endpoint_of(address) for record in listed.peers for address in (*record.urls, *record.addresses)]
        is_for_asker = all(end is not None and may_be_named(end.host, between=(asker,)) for end in ends)
        return text if is_for_asker else None

    def take_in(self, text: str, *, age_s_max: float = math.inf) -> None:
        """Take in a list. Raises RemoteError if the run's coordinator did not sign it, or too long ago for a peer to show.

        One that a peer shows and that is older than the newest known list changes nothing that is known: it could name
        machines that moved, or addresses that are others' now. The coordinator's own counts, also after its clock was set back.
        """
        listed = open_peer_list(text, self._run)
        if self._clock.now_ms() - listed.issued_at_ms > age_s_max * 1_000:
            raise RemoteError(ErrorCode.EXPIRED, "the list of peers is too old")
        is_older = age_s_max < math.inf and self._list is not None and listed.issued_at_ms < self._list[1].issued_at_ms
        for offered in listed.peers:
            if is_older and offered.peer in self.records:
                continue
            urls, addresses = (tuple(filter(self.may_dial, every)) for every in (offered.urls, offered.addresses))
            if offered.peer != self.me and (urls or addresses):
                self.records.pop(offered.peer, None)
                self.records[offered.peer] = PeerRecord(peer=offered.peer, urls=urls, addresses=addresses)
        while len(self.records) > limits.PEER_RECORDS_MAX:
            del self.records[next(iter(self.records))]
        if listed.peers and (self._list is None or listed.issued_at_ms > self._list[1].issued_at_ms):
            self._list = (text, listed)

    def _keep_ticket(self, ticket: str) -> None:
        """Keep a ticket unless the current one is recent. A new one costs every peer three signatures to check."""
        if not ticket:
            return  # we do not take part now; an earlier ticket is valid until it expires
        now_s = self._clock.monotonic_s()
        is_old = self._ticket_ring != self._run.keys.version or now_s - self._ticket_at_s > TICKET_KEPT_S
        if self._ticket is None or is_old:
            self._ticket, self._ticket_at_s, self._ticket_ring = ticket, now_s, self._run.keys.version
            self._tokens.clear()

    def authorization(self, peer: KeyId) -> str | None:
        """Return the header that shows our ticket to `peer`.

        Return None while we have none: strangers are served, invalid tickets are not.
        """
        if self._ticket is not None and self._ticket_ring != self._run.keys.version:
            self._ticket = None
            self._woken.set()
        if self._ticket is None:
            return None
        now_ms = self._clock.now_ms()
        made_ms, shown = self._tokens.get(peer, (0, ""))
        if abs(now_ms - made_ms) > TOKEN_AGE_S_MAX * 500:
            shown = authorization(self._ticket, peer, self._run.digest, self._key, now_ms=now_ms)
            self._tokens[peer] = (now_ms, shown)
        return shown

    async def _exchange(self, links: list[PeerLink]) -> None:
        """Ask two peers for the lists that they have."""
        for link in self._rng.sample(links, min(2, len(links))):
            try:
                async with asyncio.timeout(LIST_S_MAX):
                    text = await link.peers()
                self.take_in(text, age_s_max=LIST_AGE_S_MAX)
            except (RemoteError, Unreachable, TimeoutError) as error:
                if not (isinstance(error, RemoteError) and error.code is ErrorCode.MALFORMED):
                    reason = str(error) or f"no whole answer within {LIST_S_MAX:g} s"
                    log.info("a peer sent no list of peers: %s", reason)
            await asyncio.sleep(0)
