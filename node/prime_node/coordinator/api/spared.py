"""Answers that anybody may ask for and that take long to make: however many ask, making them takes a share of our time at most.

The status of a thousand workers is half a megabyte and takes the event loop some tens of milliseconds, in which nobody is leased
anything. So what took long is shown again for a while; what is made at once is made each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from prime_node.ports.clock import Clock

T = TypeVar("T")

SHARE = 0.05
"""Of the time, for making one answer again and again."""
SHORT_S = 0.002
"""Nobody notices."""
OLD_S_MAX = 10.0
"""A process that was stopped, or a machine that stood still, in the middle of making took long only this once."""


class Spared(Generic[T]):
    """The answer that `make` gives, at most `1 / SHARE` times as old as it took to make, and never older than OLD_S_MAX."""

    def __init__(self, make: Callable[[], T], clock: Clock) -> None:
        self._make, self._clock = make, clock
        self._made: T | None = None
        self._until_s = 0.0

    def get(self) -> T:
        began_s = self._clock.monotonic_s()
        if self._made is not None and began_s < self._until_s:
            return self._made
        self._made = self._make()
        took_s = self._clock.monotonic_s() - began_s
        self._until_s = began_s + (min(took_s / SHARE, took_s + OLD_S_MAX) if took_s > SHORT_S else 0.0)
        return self._made
