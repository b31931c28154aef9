"""Where the time of a run of tests went: which groups took long, and how long each process had nothing to do at the end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

GROUPS_SHOWN = 12


class Schedule:
    """The times of a run with several processes, from the reports of its tests."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._first: dict[str, float] = {}
        self._last: dict[str, float] = {}
        self._busy: defaultdict[str, float] = defaultdict(float)

    def add(self, process: str, test: str, *, start: float, stop: float) -> None:
        """Record one phase of a test. The group is what pytest-xdist appends to its id."""
        self._seconds[test.rpartition("@")[2]] += stop - start
        self._first[process] = min(start, self._first.get(process, start))
        self._last[process] = max(stop, self._last.get(process, stop))
        self._busy[process] += stop - start

    def lines(self) -> Iterator[str]:
        """Yield a line for each process, then one for each of the longest groups."""
        end = max(self._last.values(), default=0.0)
        for process in sorted(self._last):
            lasted = self._last[process] - self._first[process]
            yield (
                f"{process}: {self._busy[process]:,.0f} s in tests of {lasted:,.0f} s, "
                f"then {end - self._last[process]:,.0f} s without one"
            )
        longest = sorted(self._seconds.items(), key=lambda item: -item[1])[:GROUPS_SHOWN]
        yield from (f"{seconds:7,.0f} s  {group}" for group, seconds in longest)
