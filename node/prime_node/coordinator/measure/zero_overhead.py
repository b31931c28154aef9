"""The baseline for overlap: a replay of the same work by a scheduler without cost. Pure.

The inputs are the time to generate each work, to train each step and to distribute a policy. The replay computes when the
policies would have been published if requests, answers, uploads, checks and swaps took no time. Only the rule of step.py, the
number of workers and the order of the work remain. Closeness is that time divided by the measured one: 1 means that the
scheduler lost nothing. The cost of k, slow workers or slow links is in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from prime_protocol.step import Admission


class Work(NamedTuple):
    """A unit of one worker's work. Example: Work(first_slot=64, num_groups=1, seconds=16.2)."""

    first_slot: int
    num_groups: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitingRules:
    """The part of a run's rules that determines the waiting."""

    admission: Admission
    batches_per_step: int = 1

    @property
    def batch_groups(self) -> int:
        """The groups of one batch."""
        return self.admission.groups_per_step // self.batches_per_step


def published_at(
    works: Sequence[Work],
    mode: WaitingRules,
    *,
    workers: int,
    train_seconds: Callable[[int], float],
    available_seconds: float,
    num_steps: int,
) -> list[float]:
    """Return when policies 1, 2, ... `num_steps` would be published, in seconds after policy 0 can be used.

    `works` hold the slots from 0 on, in order, each once, and all that `num_steps` steps train. `train_seconds` of a step are
    spread evenly over its batches. All workers can use a policy `available_seconds` after its publication.
    """
    return _Replay(works, mode, workers, train_seconds, available_seconds, num_steps).run()


_WORK, _TRAINED, _AVAILABLE = range(3)


class _Replay:
    def __init__(
        self,
        works: Sequence[Work],
        mode: WaitingRules,
        workers: int,
        train_seconds: Callable[[int], float],
        available_seconds: float,
        num_steps: int,
    ) -> None:
        self.works, self.mode, self.num_steps = works, mode, num_steps
        self.train_seconds, self.available_seconds = train_seconds, available_seconds
        self.idle, self.next_work, self.usable = workers, 0, 0
        self.training = False
        self.batches_done = 0
        self.num_filled = 0
        self.filled: set[int] = set()
        """Slots filled out of turn, if selection is in order. The trainer waits for the lowest one that is missing."""
        self.events: list[tuple[float, int, int]] = []
        self.published: list[float] = []

    def run(self) -> list[float]:
        now_s = 0.0
        self._go_on(now_s)
        while self.events and len(self.published) < self.num_steps:
            now_s, kind, payload = heappop(self.events)
            if kind == _WORK:
                self.idle += 1
                self._fill(self.works[payload])
            elif kind == _AVAILABLE:
                self.usable = max(self.usable, payload)
            else:
                self.training = False
                self.batches_done += 1
                if self.batches_done % self.mode.batches_per_step == 0:
                    self.published.append(now_s)
                    heappush(self.events, (now_s + self.available_seconds, _AVAILABLE, len(self.published)))
            self._go_on(now_s)
        assert len(self.published) == self.num_steps, "there is work for every step"
        return self.published

    def _fill(self, work: Work) -> None:
        if not self.mode.admission.is_in_order:
            self.num_filled += work.num_groups
            return
        self.filled.update(range(work.first_slot, work.first_slot + work.num_groups))
        while self.num_filled in self.filled:
            self.filled.remove(self.num_filled)
            self.num_filled += 1

    def _go_on(self, now_s: float) -> None:
        slots_end = self.mode.admission.slots_end(self.usable)
        while self.idle and self.next_work < len(self.works):
            work = self.works[self.next_work]
            if work.first_slot >= slots_end:  # works may extend beyond it: they need not tile a run's steps
                break
            heappush(self.events, (now_s + work.seconds, _WORK, self.next_work))
            self.next_work += 1
            self.idle -= 1
        if not self.training and self.num_filled >= (self.batches_done + 1) * self.mode.batch_groups:
            self.training = True
            step = self.batches_done // self.mode.batches_per_step
            seconds = self.train_seconds(step) / self.mode.batches_per_step
            heappush(self.events, (now_s + seconds, _TRAINED, 0))
