"""A virtual clock: processes are generators that yield what they wait for; time advances only when all of them wait.

    def worker(time):
        yield 2.5                     # sleeps
        yield bell                    # until it is rung
        yield bell.within(10.0)       # or until this many seconds have passed

Invariant: the same processes give the same run; events of one moment run in the order in which their waits began.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count


class Bell:
    """A condition that wakes all current waiters when rung.

    It is not remembered: later waiters wait for the next ring.
    """

    def __init__(self, time: VirtualTime) -> None:
        self._time = time
        self._waiting: list[_Sleeper] = []

    def ring(self) -> None:
        """Wake all current waiters."""
        waiting, self._waiting = self._waiting, []
        for sleeper in waiting:
            self._time.wake(sleeper)

    def within(self, seconds: float) -> Within:
        """Return a wait for this bell of at most `seconds`."""
        return Within(self, seconds)

    def add(self, sleeper: _Sleeper) -> None:
        """Add a waiter."""
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
        """Start a process, after the processes that are already due."""
        heappush(self._due, (self.now_s, next(self._order), _Sleeper(process)))

    def wake(self, sleeper: _Sleeper) -> None:
        """Make a waiting process due now, once."""
        if not sleeper.is_awake:
            sleeper.is_awake = True
            heappush(self._due, (self.now_s, next(self._order), _Sleeper(sleeper.process)))

    def run(self, *, until: Callable[[], bool]) -> None:
        """Run until `until` holds. Raises RuntimeError if everyone waits forever before."""
        while not until():
            if not self._due:
                raise RuntimeError(f"at {self.now_s:.1f} s every task waits for another one")
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
