"""Choice of the next peer to serve when more ask than the uplink carries. Pure.

At most `slots` answers are in progress, one to each member. Other requests wait in a bounded queue, few per peer. A free slot
goes to the peer with the smallest ratio of bytes received to bytes given here, both decaying with a half-life. This is
proportional response, under which withholding gains nothing (Levin et al., "BitTorrent is an Auction", SIGCOMM 2008). A grant
lets newcomers begin; members of the run have a larger one than strangers. A seeder is given nothing, so there all peers get
the same.

One network has at most a share of the slots and of the queue, however many members' keys it has: keys are cheap, and slow
readers hold their slots.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from prime_node.fair_places import has_place
from prime_protocol import limits

COMPARED_MAX = 32
"""Number of waiting peers that are compared, longest wait first, so that a full origin decides in microseconds."""
ACCOUNTS_IDLE_MAX = 1_024
"""Number of accounts above which those of peers idle for long are dropped."""


class UploadTurn(StrEnum):
    """Result of a request for a slot."""

    NOW = "now"
    WAIT = "wait"
    """The request is queued: `done` will return it."""
    REFUSED = "refused"
    """Too many requests wait already. Ask another peer, or later."""


@dataclass(frozen=True, slots=True)
class ChokerRules:
    """Settings of a serving side."""

    slots: int = 16
    """Answers in progress at the same time."""
    each_max: int = 1
    """Answers in progress to one member.

    One at a time, pieces are whole sooner than side by side. A waiting request that is taken over elsewhere has cost no
    upload.
    """
    members_share: float = 0.5
    """Share of the slots for members only.

    Strangers count as one peer and prove no identity; slow readers could hold all slots.
    """
    network_share: float = 0.25
    """Share of the slots for all members of one network. The last such share is for networks without a slot: slow readers of
    several networks, and all strangers, leave them one."""
    waiting_max: int = limits.PEER_REQUESTS_WAITING_MAX
    """Waiting requests of all peers."""
    waiting_per_peer_max: int = limits.PEER_REQUESTS_WAITING_EACH_MAX
    waiting_per_network_max: int = limits.PEER_REQUESTS_WAITING_NETWORK_MAX
    half_life_s: float = 30.0
    """Half-life in seconds of the bytes given and received."""
    member_grant_bytes: float = 2**22
    """Bytes credited to a new peer of the run."""
    stranger_grant_bytes: float = 2**18
    """Bytes credited to strangers."""


@dataclass(slots=True)
class _Account:
    given_bytes: float = 0.0
    received_bytes: float = 0.0
    settled_s: float = 0.0
    is_member: bool = True
    network: str = ""
    """Network its requests come from; empty if it counts alone."""


class Choker:
    """The queue for upload slots. Requests are numbers that the caller chooses; peers are names."""

    def __init__(self, rules: ChokerRules | None = None) -> None:
        self.rules = rules or ChokerRules()
        self.serving = 0
        self._accounts: dict[str, _Account] = {}
        self._waiting: dict[str, deque[int]] = {}
        """Requests by peer, longest wait first."""
        self.num_waiting = 0
        self._served: dict[str, int] = {}
        """Answers in progress, by peer."""
        self.served_in: Counter[str] = Counter()
        """Answers in progress, by network."""
        self.waiting_in: Counter[str] = Counter()

    def asked(self, peer: str, request: int, now_s: float, *, is_member: bool = True, network: str = "") -> UploadTurn:
        """Ask for a slot. All members in one `network` have a bounded share; an empty network has none."""
        account = self._account(peer, now_s)
        account.is_member = is_member
        if peer not in self._served and peer not in self._waiting:  # otherwise its old network's counts would stay
            account.network = network
        if self.serving < self.rules.slots and self._may_have_one(peer):
            self._begin(peer)
            return UploadTurn.NOW
        rules, queue = self.rules, self._waiting.get(peer, ())
        if self.num_waiting >= rules.waiting_max or len(queue) >= rules.waiting_per_peer_max:
            return UploadTurn.REFUSED
        if account.network and self.waiting_in[account.network] >= rules.waiting_per_network_max:
            return UploadTurn.REFUSED
        self._waiting.setdefault(peer, deque()).append(request)
        self._count_waiting(peer, 1)
        return UploadTurn.WAIT

    def done(self, peer: str, sent_bytes: int, now_s: float) -> int | None:
        """Record that an answer was sent or has failed. Return the waiting request that takes its slot."""
        self._account(peer, now_s).received_bytes += sent_bytes
        self.serving -= 1
        self._served[peer] -= 1
        if not self._served[peer]:
            del self._served[peer]
        _add(self.served_in, self._accounts[peer].network, -1)
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
        """Record verified bytes that a peer has given us."""
        self._account(peer, now_s).given_bytes += num_bytes

    def withdrawn(self, peer: str, request: int) -> None:
        """Remove a waiting request."""
        queue = self._waiting.get(peer)
        if queue is not None and request in queue:
            queue.remove(request)
            self._count_waiting(peer, -1)
            if not queue:
                del self._waiting[peer]

    def _may_have_one(self, peer: str) -> bool:
        rules, account = self.rules, self._accounts[peer]
        held, share = self.served_in[account.network], max(1, int(rules.slots * rules.network_share))
        if account.network and not has_place(held, self.serving, most=rules.slots, share=share):
            return False
        most = rules.each_max if account.is_member else max(1, rules.slots - int(rules.slots * rules.members_share))
        return self._served.get(peer, 0) < most

    def _begin(self, peer: str) -> None:
        self.serving += 1
        self._served[peer] = self._served.get(peer, 0) + 1
        _add(self.served_in, self._accounts[peer].network, 1)

    def _count_waiting(self, peer: str, num: int) -> None:
        self.num_waiting += num
        _add(self.waiting_in, self._accounts[peer].network, num)

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
    """Count in a network, and delete its entry at 0: others choose how many networks there are."""
    if network:
        counts[network] += num
        if not counts[network]:
            del counts[network]
