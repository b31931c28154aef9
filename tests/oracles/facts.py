"""What an upstream rule may know of a run: groups in progress and ready, and how far training is.

A rule is written from its framework's source, which its module names. Its functions take plain values and decide only who
may begin, what is too old and which groups a batch takes. `Facts` does the counting for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(slots=True)
class Group:
    """A group that is begun and in no batch."""

    number: int
    """Position in the order in which groups are first begun. A group that is begun again keeps it."""
    version: int
    """Newest policy when it was begun."""
    arrival: int | None = None
    """Position among all groups in the order in which they become ready; None while it is in progress."""


@dataclass(slots=True)
class Facts:
    """The state of a run in terms that all frameworks share."""

    size: int
    """Groups of one batch."""
    batches: int = 1
    """Batches of one step."""
    version: int = 0
    """Newest policy."""
    step: int = 0
    """Step of the next batch."""
    part: int = 0
    """Batches of that step that are taken already."""
    taken: int = 0
    """Groups that batches took."""
    arrivals: int = 0
    groups: dict[int, Group] = field(default_factory=dict)
    begun_since: int = 0
    """Groups begun since the newest policy appeared."""
    left_over: int = 0
    """Groups that were in progress or ready at that time."""

    @property
    def running(self) -> list[Group]:
        """Groups in progress, in the order of their numbers."""
        return sorted(
            (group for group in self.groups.values() if group.arrival is None), key=lambda group: group.number
        )

    @property
    def ready(self) -> list[Group]:
        """Groups that are ready, in the order of their numbers."""
        known = (group for group in self.groups.values() if group.arrival is not None)
        return sorted(known, key=lambda group: group.number)

    @property
    def arrived(self) -> list[Group]:
        """Groups that are ready, in the order in which they became so."""
        return sorted(self.ready, key=lambda group: group.arrival or 0)

    def begin(self, number: int) -> None:
        """Begin a group on the newest policy."""
        self.groups[number] = Group(number, self.version)
        self.begun_since += 1

    def finish(self, number: int) -> None:
        """Make a group ready."""
        self.groups[number].arrival = self.arrivals
        self.arrivals += 1

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop groups that failed or became too old."""
        for number in list(numbers):
            del self.groups[number]

    def take(self, numbers: Iterable[int]) -> None:
        """Move groups to the batch."""
        self.forget(numbers)
        self.taken += self.size
        self.part += 1
        if self.part == self.batches:
            self.step, self.part = self.step + 1, 0

    def publish(self) -> None:
        """Make the next policy the newest."""
        self.version += 1
        self.begun_since, self.left_over = 0, len(self.groups)


class Rule(Protocol):
    """An upstream rule with its settings."""

    def may_begin(self, facts: Facts) -> bool:
        """Return whether another group may be begun."""
        ...

    def stale(self, facts: Facts) -> set[int]:
        """Return the ready groups that are dropped before a batch is taken."""
        ...

    def batch(self, facts: Facts) -> set[int] | None:
        """Return the groups of the next batch; None if it has to wait."""
        ...


@runtime_checkable
class Cancelling(Rule, Protocol):
    """An upstream rule that ends work in progress."""

    def cancelled(self, facts: Facts) -> set[int]:
        """Return the groups in progress that are ended as a policy is published."""
        ...


def first(groups: list[Group], count: int) -> set[int] | None:
    """Return the numbers of the first groups; None if there are fewer."""
    return {group.number for group in groups[:count]} if len(groups) >= count else None
