"""Epochs and recent nonces, so that a signed request works once.

A request is valid for REQUEST_AGE_S_MAX before and after its time stamp. So a copy may be valid for twice as long after its
arrival, plus the time that the wall clock may fall behind within an epoch. Its nonce is remembered for at least
that. There are two generations: when the newer one is old enough, the whole older one is forgotten.

The run's keys, members and strangers have a room each. Within a room a key (for strangers: a network) that has used EACH_MIN
gets more only as a share of what is left (FREE_PARTS), and a part of the room is not available to such keys. So the heaviest
users are refused first. With the default settings it takes about two thousand member keys to fill their room.

A nonce is forgotten by a restart, and with time, once its request has expired by the clock. So an epoch begins with the
process, and again when the clock is set back, because expired requests could be valid again then. An epoch's name is random and
not stored. So it cannot be known, nor a request be signed for it, in advance. Neither kill -9 nor a copied folder nor a
restored backup brings an earlier one back.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from prime_node.coordinator.api.clock_readings import ClockReading
from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError

MEMORY_S = 2 * limits.REQUEST_AGE_S_MAX + limits.CLOCK_BACK_S_MAX
RETRY_S = 10.0
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
                (
                    "this coordinator requires requests that name its epoch (protocol/SPEC.md, section 14): install the "
                    "release that it runs"
                ),
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
class _Generation:
    seen: set[str] = field(default_factory=set)
    in_room: Counter[Room] = field(default_factory=Counter)
    by_name: Counter[tuple[Room, str]] = field(default_factory=Counter)


class Nonces:
    """Bounded memory of nonces. When it is full, it refuses requests rather than forget nonces."""

    def __init__(self, *, nonces_max: int) -> None:
        apart = nonces_max // APART_PARTS
        self._room_max = {Room.ROLES: apart, Room.STRANGERS: apart, Room.MEMBERS: nonces_max - 2 * apart}
        self._newer, self._older = _Generation(), _Generation()
        self._since_s = 0.0

    def require_new(self, signer: str, nonce: str) -> None:
        """Raise RemoteError(REPLAYED) if the nonce is known."""
        if signer + nonce in self._newer.seen or signer + nonce in self._older.seen:
            raise RemoteError(ErrorCode.REPLAYED, "this request was received before; sign a new one")

    def spend(self, signer: str, nonce: str, now_s: float, *, room: Room = Room.MEMBERS, network: str = "") -> None:
        """Remember a nonce. `network` is the network whose share it takes, if not the signer's own.

        Raise RemoteError: REPLAYED, TOO_MANY_REQUESTS if the share is used up, or UNAVAILABLE if the room is full.
        """
        if now_s - self._since_s > MEMORY_S:
            self._newer, self._older = _Generation(), self._newer
            if now_s - self._since_s > 2 * MEMORY_S:
                self._older = _Generation()
            self._since_s = now_s
        self.require_new(signer, nonce)
        newer, older, name = self._newer, self._older, (room, network or signer)
        left = self._room_max[room] - newer.in_room[room] - older.in_room[room]
        if left <= 0:
            raise RemoteError(ErrorCode.UNAVAILABLE, "too many requests at once", retry_after_s=RETRY_S)
        used, parts = newer.by_name[name] + older.by_name[name], 1 if room is Room.ROLES else FREE_PARTS
        kept = self._room_max[room] // APART_PARTS
        if used >= EACH_MIN and parts * used >= left - kept:
            raise RemoteError(
                ErrorCode.TOO_MANY_REQUESTS, "too many requests in the last minutes", retry_after_s=RETRY_S
            )
        newer.seen.add(signer + nonce)
        newer.in_room[room] += 1
        newer.by_name[name] += 1
