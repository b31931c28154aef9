"""Nonces seen lately, so that a signed request works once.

A request is accepted up to REQUEST_AGE_S_MAX before and after its time stamp, so a copy of it could be accepted for twice as long
after its arrival, and longer by what the wall clock may fall behind within an epoch (epochs.py). Its nonce is remembered for at
least that. Two generations: when the newer one is old enough, the older one is forgotten as a whole. Nonces are remembered by
signer, so nobody can use up another's.
"""

from __future__ import annotations

from prime_protocol import limits
from prime_protocol.errors import ErrorCode, PeerError

MEMORY_S = 2 * limits.REQUEST_AGE_S_MAX + limits.CLOCK_BACK_S_MAX


class Nonces:
    """Bounded: when it is full, requests are refused rather than nonces forgotten."""

    def __init__(self, *, nonces_max: int) -> None:
        self._nonces_max = nonces_max
        self._newer: set[str] = set()
        self._older: set[str] = set()
        self._since_s = 0.0

    def require_new(self, signer: str, nonce: str) -> None:
        """Raises PeerError(REPLAYED)."""
        if signer + nonce in self._newer or signer + nonce in self._older:
            raise PeerError(ErrorCode.REPLAYED, "this request was sent before; sign a new one")

    def spend(self, signer: str, nonce: str, now_s: float) -> None:
        """Remember a nonce. Raises PeerError: REPLAYED, or UNAVAILABLE where the memory is full."""
        if now_s - self._since_s > MEMORY_S:
            self._newer, self._older = set(), self._newer
            if now_s - self._since_s > 2 * MEMORY_S:
                self._older = set()
            self._since_s = now_s
        self.require_new(signer, nonce)
        if len(self._newer) + len(self._older) >= self._nonces_max:
            raise PeerError(ErrorCode.UNAVAILABLE, "too many requests at once", retry_after_s=10.0)
        self._newer.add(signer + nonce)
