"""What gateways may hold of the writer's memory: calls in progress, and long packets that have not arrived whole.

A call beyond its bound is refused. A packet takes room for its whole length as soon as that is known. Where there is none, its
link is not read, and has its turn in order of arrival. So no link is cut for load, and what has room can always end. Only a
packet that trickles while others wait loses its link. A packet of TOGETHER_BYTES_MAX or fewer, such as one of heartbeats, waits
for nothing: one address has few links.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from prime_node.adapters.link.sealed_frames import CODE_BYTES, PACKET_BYTES_MAX, TOGETHER_BYTES_MAX
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

CALLS_EACH_MAX = 2 * limits.HTTP_CONNECTIONS_MAX
"""Calls in progress from one address."""
HELD_BYTES_MAX = limits.MEMBERS_BODY_BYTES_MAX
"""Bytes of these calls, or two of the longest bodies if that is more."""
BUSY_RETRY_S = 1.0
ARRIVING_BYTES_MAX = 2**28
"""Bytes of packets from one address that have not arrived whole, or two of the longest if that is more."""
ADDRESSES_ARRIVING = 4
"""Addresses that can use all of theirs at the same time."""
SLOW_S, BYTES_PER_SECOND_MIN = 5.0, 2**17
"""Seconds after which a packet that others wait for must have arrived at this average, or its link ends."""


class HeldCalls:
    """Calls in progress and their bytes, by the address of the gateway."""

    def __init__(self) -> None:
        self._num_calls, self._num_bytes = Counter[str](), Counter[str]()

    def hold(self, address: str, num_bytes: int, *, longest: int, num_calls: int = 0) -> None:
        """Count a call or its bytes. Raises RemoteError if the gateways of this address have too many."""
        if (
            self._num_calls[address] + num_calls > CALLS_EACH_MAX
            or num_bytes > longest
            or self._num_bytes[address] + num_bytes > max(HELD_BYTES_MAX, 2 * longest)
        ):
            raise RemoteError(
                ErrorCode.UNAVAILABLE, "this gateway forwards too much at once", retry_after_s=BUSY_RETRY_S
            )
        self._num_calls[address] += num_calls
        self._num_bytes[address] += num_bytes

    def let_go(self, address: str, num_bytes: int) -> None:
        """Uncount a call that has ended, and all of its bytes."""
        for counted, number in ((self._num_calls, 1), (self._num_bytes, num_bytes)):
            counted[address] -= number
            if not counted[address]:
                del counted[address]


class ArrivingLink(Protocol):
    """A link that may wait for room."""

    address: str

    def read_on(self) -> None:
        """Read the packet: there is room for it now."""


class ArrivingPackets:
    """Packets that have not arrived whole, of all links of one server."""

    def __init__(self) -> None:
        self.longest = PACKET_BYTES_MAX
        """Length of the longest packet."""
        self.num_bytes = Counter[str]()
        """Their lengths, by the address of the gateway."""
        self._held: dict[ArrivingLink, tuple[int, float]] = {}
        """Length of each, and the time at which it got room."""
        self._waiting: dict[ArrivingLink, int] = {}

    def enter(self, link: ArrivingLink, length: int, now_s: float) -> bool:
        """Take room for the packet that arrives, in place of the last one. Return whether its link is to be read.

        `length` is that of the whole packet; 0 if none arrives, or its length has not.
        """
        if length <= CODE_BYTES + TOGETHER_BYTES_MAX:
            length = 0
        if link in self._held and self._held[link][0] != length:
            self.leave(link, now_s)
        if length and link not in self._held:
            self._waiting[link] = length
            self._give(now_s)
        return link not in self._waiting

    def leave(self, link: ArrivingLink, now_s: float) -> None:
        """Free the room of a link: its packet has arrived, or the link has ended."""
        self._waiting.pop(link, None)
        length, _ = self._held.pop(link, (0, 0.0))
        if length:
            self.num_bytes[link.address] -= length
            if not self.num_bytes[link.address]:
                del self.num_bytes[link.address]
        self._give(now_s)

    def is_waiting(self, link: ArrivingLink) -> bool:
        """Return whether a link waits for room."""
        return link in self._waiting

    def is_too_slow(self, link: ArrivingLink, num_bytes: int, now_s: float) -> bool:
        """Return whether others wait for the room of a packet that trickles: `num_bytes` of it have arrived."""
        _, since_s = self._held.get(link, (0, now_s))
        passed_s = now_s - since_s
        return bool(self._waiting) and passed_s > SLOW_S and num_bytes < BYTES_PER_SECOND_MIN * passed_s

    def _give(self, now_s: float) -> None:
        each, full = max(ARRIVING_BYTES_MAX, 2 * self.longest), set[str]()
        for link, length in list(self._waiting.items()):
            if self.num_bytes.total() + length > ADDRESSES_ARRIVING * each:
                return  # shorter ones do not overtake it
            if self.num_bytes[link.address] + length > each:
                full.add(link.address)
            if link.address not in full:
                del self._waiting[link]
                self._held[link] = (length, now_s)
                self.num_bytes[link.address] += length
                link.read_on()
