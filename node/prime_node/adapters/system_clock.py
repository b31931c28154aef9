"""The machine's own clocks."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements ports.clock.Clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
