"""Time. Roles never call time.time() themselves, so that a simulation can run them on a virtual clock."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Wall time for what crosses the wire, monotonic time for durations."""

    def now_ms(self) -> int:
        """Unix time in milliseconds. May jump when the machine wakes up or its clock is set."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never run backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Let others run for at least `seconds`. Cancellable."""
        ...
