"""Epochs and recent nonces, so that a signed request works once.

A request is valid for REQUEST_AGE_S_MAX before and after its time stamp. So a copy may be valid for twice as long after its
arrival, plus the time that the wall clock may fall behind within an epoch. Its nonce is remembered for at least
that, and for at most one of SLICES parts more. Each slice of time has a set of its own, which is forgotten as a whole.

A nonce is kept as 64 bits of a hash with a secret of this process, which takes half the memory. Two of ten million have the
same by a chance of one in 400,000; then an honest request is refused once, and its sender signs another one.

The run's keys, members and strangers have a room each. Within a room a key (for strangers: a network) that has used EACH_MIN
gets more only as a share of what is left (FREE_PARTS), and a part of the room is not available to such keys. So the heaviest
users are refused first. The members' room grows with their number, by MEMBER_NONCES each: a run with many workers is no full one.

A nonce is forgotten by a restart, and with time, once its request has expired by the clock. So an epoch begins with the
process, and again when the clock is set back, because expired requests could be valid again then. An epoch's name is random and
not stored. So it cannot be known, nor a request be signed for it, in advance. Neither kill -9 nor a copied folder nor a
restored backup brings an earlier one back.
"""

from __future__ import annotations

import secrets
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum

from prime_node.coordinator.api.clock_readings import ClockReading
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

MEMORY_S = 2 * limits.REQUEST_AGE_S_MAX + limits.CLOCK_BACK_S_MAX
RETRY_S = 10.0
SLICES = 8
MEMBER_NONCES = 512
"""Nonces for which each active worker adds room: about two requests a second. Its own rate is limited elsewhere."""
APART_PARTS = 4
"""Parts of the memory: the run's keys have one, strangers another, and members the rest.

Within each of the three, one of as many parts is for keys and networks that have used less than EACH_MIN."""
EACH_MIN = 64
"""Nonces that a member's key, or a strangers' network, may use while its kind has any room."""
FREE_PARTS = 8
"""Parts of what is left; beyond EACH_MIN a key gets more while it has used at most one part."""


class Epochs:
    """The current epoch. A new one begins when the wall clock falls CLOCK_BACK_S_MAX behind the monotonic clock."""

    def __init__(self) -> None:
        self._present = secrets.token_hex(16)
        self._ahead_s: float | None = None
        """Maximum lead of the wall clock over the monotonic one in this epoch."""

    def present(self, now: ClockReading) -> str:
        """Return the epoch's name.

        The lead is known up to `now.apart_s`. So a process that is stopped between two readings begins no epoch.
        """
        most_s = now.unix_ms / 1_000 - now.monotonic_s
        least_s = most_s - now.apart_s
        if self._ahead_s is None or least_s > self._ahead_s:
            self._ahead_s = least_s
        elif most_s < self._ahead_s - limits.CLOCK_BACK_S_MAX:
            self._present, self._ahead_s = secrets.token_hex(16), least_s
        return self._present

    def require(self, epoch: str, now: ClockReading) -> None:
        """Check a request's epoch.

        Raise RemoteError: WRONG_EPOCH with the current epoch, VERSION_UNSUPPORTED for a request without one, from older clients.
        """
        present = self.present(now)
        if not epoch:
            raise RemoteError(
                ErrorCode.VERSION_UNSUPPORTED,
                "this coordinator requires requests that name its epoch (protocol/SPEC.md, section 14), and your software is "
                "too old for that: run `prime-node upgrade`, or install the release that the run's operator names",
            )
        if epoch != present:
            raise RemoteError(
                ErrorCode.WRONG_EPOCH,
                "the request was signed for another epoch of this coordinator; sign it again for the current one",
                epoch=present,
            )


class Room(StrEnum):
    """Keys whose nonces are counted together."""

    ROLES = "roles"
    """The run's own keys. FREE_PARTS does not apply: one key may use as much as it leaves."""
    MEMBERS = "members"
    STRANGERS = "strangers"


@dataclass(slots=True)
class _Slice:
    end_s: float
    """Time from which no nonce is added."""
    seen: set[int] = field(default_factory=set)
    in_room: Counter[Room] = field(default_factory=Counter)
    by_name: Counter[tuple[Room, str]] = field(default_factory=Counter)


class Nonces:
    """Bounded memory of nonces. When it is full, it refuses requests rather than forget nonces."""

    def __init__(self, *, nonces_max: int) -> None:
        apart = nonces_max // APART_PARTS
        self._room_max = {Room.ROLES: apart, Room.STRANGERS: apart, Room.MEMBERS: nonces_max - 2 * apart}
        self._slices: deque[_Slice] = deque()
        self._in_room: Counter[Room] = Counter()
        self._by_name: Counter[tuple[Room, str]] = Counter()
        self._secret = secrets.token_hex(16)

    def require_new(self, signer: str, nonce: str) -> int:
        """Return what `spend` remembers of a nonce. Raise RemoteError(REPLAYED) if it is known."""
        hashed = hash(f"{self._secret} {signer} {nonce}")
        for one in self._slices:
            if hashed in one.seen:
                raise RemoteError(ErrorCode.REPLAYED, "this request was received before; sign a new one")
        return hashed

    def spend(
        self,
        signer: str,
        nonce: str,
        now_s: float,
        *,
        room: Room = Room.MEMBERS,
        network: str = "",
        num_members: int = 0,
        new: int | None = None,
    ) -> None:
        """Remember a nonce. `network` is the network whose share it takes, if not the signer's own.

        `new` is what `require_new` has just returned for it.

        Raise RemoteError: REPLAYED, TOO_MANY_REQUESTS if the share is used up, or UNAVAILABLE if the room is full.
        """
        newest = self._slice_at(now_s)
        known = self.require_new(signer, nonce) if new is None else new
        name = (room, network or signer)
        room_max = self._room_max[room] + (MEMBER_NONCES * num_members if room is Room.MEMBERS else 0)
        left = room_max - self._in_room[room]
        if left <= 0:
            raise RemoteError(ErrorCode.UNAVAILABLE, "too many requests at once", retry_after_s=RETRY_S)
        used, parts = self._by_name[name], 1 if room is Room.ROLES else FREE_PARTS
        kept = room_max // APART_PARTS
        if used >= EACH_MIN and parts * used >= left - kept:
            raise RemoteError(
                ErrorCode.TOO_MANY_REQUESTS, "too many requests in the last minutes", retry_after_s=RETRY_S
            )
        newest.seen.add(known)
        newest.in_room[room] += 1
        self._in_room[room] += 1
        newest.by_name[name] += 1
        self._by_name[name] += 1

    def _slice_at(self, now_s: float) -> _Slice:
        """Forget the slices that are old enough, and return the present one."""
        while self._slices and self._slices[0].end_s < now_s - MEMORY_S:
            old = self._slices.popleft()
            self._in_room -= old.in_room  # removes what is 0
            self._by_name -= old.by_name
        if not self._slices or self._slices[-1].end_s <= now_s:
            self._slices.append(_Slice(now_s + MEMORY_S / SLICES))
        return self._slices[-1]
