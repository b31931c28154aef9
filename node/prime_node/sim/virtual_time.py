"""A clock that jumps: processes are generators that say what they wait for, and time passes only when all of them wait.

    def worker(time):
        yield 2.5                     # sleeps
        yield bell                    # until somebody rings it
        yield bell.within(10.0)       # or until so many seconds have passed

Invariant: the same processes give the same run; what is due at one moment goes on in the order in which it began to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count


class Bell:
    """Wakes everyone who waits for it when it is rung. It is not remembered: who comes later waits for the next time."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._waiting: list[_Sleeper] = []

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for sleeper in waiting:
            self._time.wake(sleeper)

    def within(self, seconds: float) -> Within:
        return Within(self, seconds)

    def add(self, sleeper: _Sleeper) -> None:
        if len(self._waiting) > 64:
            self._waiting = [each for each in self._waiting if not each.is_awake]
        self._waiting.append(sleeper)


@dataclass(frozen=True, slots=True)
class Within:
    """A bell with a deadline."""

    bell: Bell
    seconds: float


Process = Generator[float | Bell | Within, None, None]


@dataclass(slots=True, eq=False)
class _Sleeper:
    process: Process
    is_awake: bool = False


class VirtualTime:
    """Seconds since the beginning."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, _Sleeper]] = []
        self._order = count()

    @property
    def now_ms(self) -> int:
        return round(self.now_s * 1_000)

    def start(self, process: Process) -> None:
        """It begins once those who are due before it have gone on."""
        heappush(self._due, (self.now_s, next(self._order), _Sleeper(process)))

    def wake(self, sleeper: _Sleeper) -> None:
        if not sleeper.is_awake:
            sleeper.is_awake = True
            heappush(self._due, (self.now_s, next(self._order), _Sleeper(sleeper.process)))

    def run(self, *, until: Callable[[], bool]) -> None:
        """Raises RuntimeError where everyone waits for ever before `until` holds."""
        while not until():
            if not self._due:
                raise RuntimeError(f"at {self.now_s:.1f} s everyone waits for somebody else")
            at_s, _, sleeper = heappop(self._due)
            if sleeper.is_awake:  # by a bell, before its deadline
                continue
            sleeper.is_awake = True
            self.now_s = at_s
            self._step(sleeper.process)

    def _step(self, process: Process) -> None:
        try:
            wanted = next(process)
        except StopIteration:
            return
        sleeper = _Sleeper(process)
        if isinstance(wanted, Bell):
            wanted.add(sleeper)
            return
        if isinstance(wanted, Within):
            wanted.bell.add(sleeper)
            wanted = wanted.seconds
        heappush(self._due, (self.now_s + wanted, next(self._order), sleeper))
