"""The machine's own clocks."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implementation of ports.clock.Clock."""

    def now_ms(self) -> int:
        """Return the wall-clock time in ms since 1970."""
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        """Return a time in seconds that never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait for some seconds."""
        await asyncio.sleep(seconds)
