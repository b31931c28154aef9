"""Time. Roles never call time.time() directly, so that a simulation can run them on a virtual clock."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Source of wall time (for timestamps on the wire) and of monotonic time (for durations)."""

    def now_ms(self) -> int:
        """Return Unix time in milliseconds. It may jump when the machine wakes up or its clock is set."""

    def monotonic_s(self) -> float:
        """Return seconds that never run backwards."""

    async def sleep(self, seconds: float) -> None:
        """Suspend the caller for at least `seconds`. Cancellable."""
