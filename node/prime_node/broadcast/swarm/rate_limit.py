"""A limit on bytes per second, for uploads and for downloads."""

from __future__ import annotations

from prime_node.ports.clock import Clock

BURST_S = 0.25
"""Seconds' worth of a rate limit that may be used at once."""


class RateLimit:
    """A token bucket: bytes per second, with short bursts. 0 is no limit."""

    def __init__(self, bytes_per_s: float, clock: Clock) -> None:
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_s = 0.0
        """Time at which everything taken so far is paid for."""

    async def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may move. First come, first served."""
        if not self._bytes_per_s:
            return
        now_s = self._clock.monotonic_s()
        begins_s = max(self._free_s, now_s - BURST_S)
        self._free_s = begins_s + num_bytes / self._bytes_per_s
        if begins_s > now_s:
            try:
                await self._clock.sleep(begins_s - now_s)
            except BaseException:
                # Otherwise a cancelled request would keep the others waiting.
                self._free_s -= num_bytes / self._bytes_per_s
                raise
