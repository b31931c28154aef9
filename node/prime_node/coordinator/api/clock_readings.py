"""One reading of the wall clock and the monotonic clock together, which checks of requests pass as one value.

A process may stand still between two readings, for seconds on a busy machine. Read apart, the clocks then look as if one of them
had been set. So the wall clock is read between two readings of the monotonic clock, again if these lie apart. Of several such
readings the one whose two ends lie closest is taken.
"""

from __future__ import annotations

from prime_node.carrier import carrier
from prime_node.ports.clock import Clock

APART_S_MAX = 0.01
"""Seconds between the two readings of the monotonic clock that are close enough."""
READINGS_MAX = 8
"""Maximum attempts."""


@carrier(frozen=True, slots=True)
class ClockReading:
    """A time by both clocks. `unix_ms` was read after `monotonic_s`, and at most `apart_s` seconds later."""

    unix_ms: int
    monotonic_s: float
    apart_s: float = 0.0


def read_clocks(clock: Clock) -> ClockReading:
    """Return the present time by both clocks."""
    best: ClockReading | None = None
    for _ in range(READINGS_MAX):
        before_s, unix_ms, after_s = clock.monotonic_s(), clock.now_ms(), clock.monotonic_s()
        if best is None or after_s - before_s < best.apart_s:
            best = ClockReading(unix_ms, before_s, after_s - before_s)
        if best.apart_s <= APART_S_MAX:
            break
    assert best is not None
    return best
