"""Who is served next, when more ask than the uplink carries. Pure.

At most `slots` answers are on their way at one time, one to each member; other requests wait, few per peer, in a bounded room.
A free slot goes to the peer that has received the least for what it has given here, both remembered with a half-life:
proportional response, under which withholding gains nothing (Levin et al., "BitTorrent is an Auction", SIGCOMM 2008). A grant
lets newcomers begin; members of the run have a larger one than strangers. At a seeder, which is given nothing, everybody gets
the same. One network has no more than a share of the slots and of the waiting room, however many members' keys it has: keys are
cheap, and slow readers hold their slots.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from prime_protocol import limits

COMPARED_MAX = 32
"""Of the peers that wait, those whose turn was longest ago are compared: a full origin decides in microseconds."""
ACCOUNTS_IDLE_MAX = 1_024
"""Above this, accounts of peers that have not been heard of for long are dropped."""


class UploadTurn(StrEnum):
    """What becomes of a request."""

    NOW = "now"
    WAIT = "wait"
    """It is queued: `done` will name it."""
    REFUSED = "refused"
    """Too many wait already. Ask another peer, or later."""


@dataclass(frozen=True, slots=True)
class ChokerRules:
    """Settings of a serving side."""

    slots: int = 16
    """Answers on their way at one time."""
    each_max: int = 1
    """Of these, to one member. One by one, pieces are whole sooner than side by side, and of a request that is taken over
    elsewhere while it waits, nothing was sent."""
    members_share: float = 0.5
    """Of the slots, only for members: strangers, who are one peer and may be anybody, could keep all others by reading slowly."""
    network_share: float = 0.25
    """Of the slots, for all members of one network. One such network and all strangers leave slots to the others."""
    waiting_max: int = limits.PEER_REQUESTS_WAITING_MAX
    """Requests that wait, of all peers."""
    waiting_per_peer_max: int = limits.PEER_REQUESTS_WAITING_EACH_MAX
    waiting_per_network_max: int = limits.PEER_REQUESTS_WAITING_NETWORK_MAX
    half_life_s: float = 30.0
    """What was given and received counts half after this time."""
    member_grant_bytes: float = 2**22
    """What a peer of the run is taken to have given at the beginning."""
    stranger_grant_bytes: float = 2**18
    """The same for whoever does not show that he belongs to the run."""


@dataclass(slots=True)
class _Account:
    given_bytes: float = 0.0
    received_bytes: float = 0.0
    settled_s: float = 0.0
    is_member: bool = True
    network: str = ""
    """That its requests come from; empty where it counts alone."""


class Choker:
    """Requests are numbers that the caller chooses; peers are names."""

    def __init__(self, rules: ChokerRules | None = None) -> None:
        self.rules = rules or ChokerRules()
        self.serving = 0
        self._accounts: dict[str, _Account] = {}
        self._waiting: dict[str, deque[int]] = {}
        """Requests by peer; whose turn was longest ago comes first."""
        self._num_waiting = 0
        self._served: dict[str, int] = {}
        """Answers on their way, by peer."""
        self._served_in: Counter[str] = Counter()
        """The same, by network."""
        self._waiting_in: Counter[str] = Counter()

    def asked(self, peer: str, request: int, now_s: float, *, is_member: bool = True, network: str = "") -> UploadTurn:
        """A peer wants something. `network`: all members there together have a bounded share; empty for none."""
        account = self._account(peer, now_s)
        account.is_member = is_member
        if peer not in self._served and peer not in self._waiting:  # else what it has there could not be given back
            account.network = network
        if self.serving < self.rules.slots and self._may_have_one(peer):
            self._begin(peer)
            return UploadTurn.NOW
        rules, queue = self.rules, self._waiting.get(peer, ())
        if self._num_waiting >= rules.waiting_max or len(queue) >= rules.waiting_per_peer_max:
            return UploadTurn.REFUSED
        if account.network and self._waiting_in[account.network] >= rules.waiting_per_network_max:
            return UploadTurn.REFUSED
        self._waiting.setdefault(peer, deque()).append(request)
        self._count_waiting(peer, 1)
        return UploadTurn.WAIT

    def done(self, peer: str, sent_bytes: int, now_s: float) -> int | None:
        """An answer was sent, or has failed. Returns the waiting request that takes its slot."""
        self._account(peer, now_s).received_bytes += sent_bytes
        self.serving -= 1
        self._served[peer] -= 1
        if not self._served[peer]:
            del self._served[peer]
        _add(self._served_in, self._accounts[peer].network, -1)
        if not self._waiting and len(self._accounts) > ACCOUNTS_IDLE_MAX:
            self._forget(now_s)
        longest = islice(filter(self._may_have_one, self._waiting), COMPARED_MAX)
        chosen = min(longest, key=lambda name: self._received_for_given(name, now_s), default=None)
        if chosen is None:
            return None
        queue = self._waiting.pop(chosen)
        request = queue.popleft()
        if queue:
            self._waiting[chosen] = queue
        self._begin(chosen)
        self._count_waiting(chosen, -1)
        return request

    def gave(self, peer: str, num_bytes: int, now_s: float) -> None:
        """A peer has given us verified bytes."""
        self._account(peer, now_s).given_bytes += num_bytes

    def withdrawn(self, peer: str, request: int) -> None:
        """A request that waits is wanted no more."""
        queue = self._waiting.get(peer)
        if queue is not None and request in queue:
            queue.remove(request)
            self._count_waiting(peer, -1)
            if not queue:
                del self._waiting[peer]

    def _may_have_one(self, peer: str) -> bool:
        rules, account = self.rules, self._accounts[peer]
        if account.network and self._served_in[account.network] >= max(1, int(rules.slots * rules.network_share)):
            return False
        most = rules.each_max if account.is_member else max(1, rules.slots - int(rules.slots * rules.members_share))
        return self._served.get(peer, 0) < most

    def _begin(self, peer: str) -> None:
        self.serving += 1
        self._served[peer] = self._served.get(peer, 0) + 1
        _add(self._served_in, self._accounts[peer].network, 1)

    def _count_waiting(self, peer: str, num: int) -> None:
        self._num_waiting += num
        _add(self._waiting_in, self._accounts[peer].network, num)

    def _received_for_given(self, peer: str, now_s: float) -> float:
        account = self._account(peer, now_s)
        rules = self.rules
        grant = rules.member_grant_bytes if account.is_member else rules.stranger_grant_bytes
        return account.received_bytes / (account.given_bytes + grant)

    def _account(self, peer: str, now_s: float) -> _Account:
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = _Account(settled_s=now_s)
        if account.given_bytes or account.received_bytes:
            remains = 0.5 ** ((now_s - account.settled_s) / self.rules.half_life_s)
            account.given_bytes *= remains
            account.received_bytes *= remains
        account.settled_s = now_s
        return account

    def _forget(self, now_s: float) -> None:
        """Drop the accounts in which nothing is left. The caller bounds the names: members, and one for all strangers."""
        for peer in list(self._accounts):
            account = self._account(peer, now_s)
            if (
                peer not in self._waiting
                and peer not in self._served
                and account.given_bytes < 1.0
                and account.received_bytes < 1.0
            ):
                del self._accounts[peer]


def _add(counts: Counter[str], network: str, num: int) -> None:
    """Count in a network, and forget it at 0: others choose how many networks there are."""
    if network:
        counts[network] += num
        if not counts[network]:
            del counts[network]
