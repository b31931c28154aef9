"""How long to wait before asking again."""

from __future__ import annotations

import random

from prime_protocol.errors import PeerError

PAUSE_S_MIN, PAUSE_S_MAX = 0.25, 30.0


class Backoff:
    """Growing pauses with jitter, so that many workers do not come back in the same second."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._pause_s = PAUSE_S_MIN

    def next_s(self, error: Exception) -> float:
        """How long to wait after this failure."""
        pause_s = self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)
        asked_s = error.retry_after_s if isinstance(error, PeerError) else None
        return max(pause_s, min(asked_s or 0.0, PAUSE_S_MAX))
