"""Epochs: the periods within which this server remembers every nonce that it accepted.

A nonce is forgotten by a restart, and with time, once its request has expired by the clock. So an epoch begins with the
process, and again when the clock is set back, because expired requests could be valid again then. An epoch's name is random and
not stored. So it cannot be known, nor a request be signed for it, in advance. Neither kill -9 nor a copied folder nor a
restored backup brings an earlier one back.
"""

from __future__ import annotations

import secrets

from prime_protocol import limits
from prime_protocol.errors import ErrorCode, RemoteError


class Epochs:
    """The current epoch. A new one begins when the wall clock falls CLOCK_BACK_S_MAX behind the monotonic clock."""

    def __init__(self) -> None:
        self._present = secrets.token_hex(16)
        self._ahead_s: float | None = None
        """Maximum lead of the wall clock over the monotonic one in this epoch."""

    def present(self, *, now_ms: int, now_s: float) -> str:
        """Return the epoch's name. `now_ms` is Unix time, `now_s` monotonic."""
        ahead_s = now_ms / 1_000 - now_s
        if self._ahead_s is None or ahead_s > self._ahead_s:
            self._ahead_s = ahead_s
        elif ahead_s < self._ahead_s - limits.CLOCK_BACK_S_MAX:
            self._present, self._ahead_s = secrets.token_hex(16), ahead_s
        return self._present

    def require(self, epoch: str, *, now_ms: int, now_s: float) -> None:
        """Check a request's epoch.

        Raise RemoteError: WRONG_EPOCH with the current epoch, VERSION_UNSUPPORTED for a request without one, from older clients.
        """
        present = self.present(now_ms=now_ms, now_s=now_s)
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
