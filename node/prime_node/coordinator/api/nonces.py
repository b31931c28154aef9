"""Recent nonces, so that a signed request works once.

A request is valid for REQUEST_AGE_S_MAX before and after its time stamp. So a copy may be valid for twice as long after its
arrival, plus the time that the wall clock may fall behind within an epoch (epochs.py). Its nonce is remembered for at least
that. There are two generations: when the newer one is old enough, the whole older one is forgotten.

The run's keys, members and strangers have a room each. Within a room a key (for strangers: a network) that has used EACH_MIN
gets more only as a share of what is left (FREE_PARTS), and a part of the room is not available to such keys. So the heaviest
users are refused first. With the default settings it takes about two thousand member keys to fill their room.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

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
