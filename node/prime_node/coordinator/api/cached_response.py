"""Cache slow responses to cap their CPU share.

The status of a thousand workers is half a megabyte and takes the event loop some tens of milliseconds, during which it grants
no leases. So a response that took long is cached for a while; a fast one is made each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from prime_node.ports.clock import Clock

T = TypeVar("T")

SHARE = 0.05
"""Maximum share of the time spent on making one response."""
SHORT_S = 0.002
"""Time to make a response below which it is not cached."""
OLD_S_MAX = 10.0
"""Maximum age of a cached response. A process that was suspended while making one took long only once."""


class CachedResponse(Generic[T]):
    """The response of `make`, at most `1 / SHARE` times as old as it took to make, and never older than OLD_S_MAX."""

    def __init__(self, make: Callable[[], T], clock: Clock) -> None:
        self._make, self._clock = make, clock
        self._made: T | None = None
        self._until_s = 0.0

    def get(self) -> T:
        """Return the response, from the cache while it is fresh."""
        began_s = self._clock.monotonic_s()
        if self._made is not None and began_s < self._until_s:
            return self._made
        self._made = self._make()
        took_s = self._clock.monotonic_s() - began_s
        self._until_s = began_s + (min(took_s / SHARE, took_s + OLD_S_MAX) if took_s > SHORT_S else 0.0)
        return self._made
