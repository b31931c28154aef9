"""A simulated worker whose engine generates several leases side by side, as worker/loop.py does.

Concurrency: `begin` waits for leases and for room in the engine. `swap` waits for policies, if completions may span them. A
swap in flight delays all completions; a load waits until no lease is left. Every completion and every lease rings the
worker's bell.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from prime_lab.scenario import Scenario
from prime_lab.virtual_time import Bell, Process, VirtualTime
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import LeaseRecord, State
from prime_node.coordinator.state.scheduler import cancelled_leases
from prime_node.worker.pace import GenerationPace


@dataclass(slots=True)
class SimulatedWorker:
    """State of one worker."""

    name: str
    room: int
    leases_came: Bell
    policy_came: Bell
    latest: int = -1
    held: int = -1
    line: deque[LeaseRecord] = field(default_factory=deque)
    pace: GenerationPace = field(default_factory=GenerationPace)


class _Run(Protocol):
    """The part of a simulated run that a worker uses."""

    time: VirtualTime
    state: State
    scenario: Scenario

    def upload(self, lease: LeaseRecord, versions: list[int]) -> Process: ...

    def decide(self, event: ev.Event) -> None: ...


@dataclass(slots=True)
class _Job:
    """A lease in generation."""

    lease: LeaseRecord
    left: int
    """Number of unfinished completions."""
    versions: list[int]
    stopped: Bell
    is_cancelled: bool = False


class BatchingWorker:
    """The engine of a worker: `scenario.slots` places, and a queue of completions in the order of their leases."""

    def __init__(self, run: _Run, worker: SimulatedWorker) -> None:
        assert run.scenario.completion_seconds is not None
        self._run, self._worker, self._seconds = run, worker, run.scenario.completion_seconds
        self._jobs: list[_Job] = []
        self._queue: deque[tuple[_Job, float]] = deque()
        self._num_running = 0
        self.stalled_s = 0.0
        """Total duration of all swaps in flight."""
        self._worked: list[tuple[float, float]] = []
        """Start and end of each completion that ended in its place."""

    def begin(self) -> Process:
        """Begin leases in order, each once the engine has room and holds its policy."""
        worker, scenario = self._worker, self._run.scenario
        spans = scenario.schedule.swap.spans_policies
        while True:
            while not worker.line:
                yield worker.leases_came
            lease = worker.line.popleft()
            while worker.held != lease.policy_version and not (spans and worker.held > lease.policy_version):
                if self._jobs:
                    yield worker.leases_came
                else:
                    yield scenario.costs.swap
                    worker.held = lease.policy_version
            self._add(lease)
            while self._num_running + len(self._queue) >= scenario.slots:
                yield worker.leases_came
            worker.room += 1
            worker.leases_came.ring()

    def swap(self) -> Process:
        """Swap to each new policy while completions continue, if the schedule allows that."""
        worker, scenario = self._worker, self._run.scenario
        while scenario.schedule.swap.spans_policies:
            while worker.latest <= worker.held or not self._jobs:
                yield worker.policy_came if worker.latest <= worker.held else worker.leases_came
            self.stalled_s += scenario.costs.swap
            yield scenario.costs.swap
            worker.held = worker.latest
            for job in self._jobs:
                job.versions.append(worker.held)
            worker.leases_came.ring()

    def hear(self) -> Process:
        """Stop what the answers to heartbeats name."""
        state, name = self._run.state, self._worker.name
        while True:
            yield self._run.scenario.costs.heartbeat
            for lease_id in cancelled_leases(state, name, [job.lease.lease_id for job in self._jobs]):
                self._stop(next(job for job in self._jobs if job.lease.lease_id == lease_id))

    def _stop(self, job: _Job) -> None:
        job.is_cancelled = True
        self._jobs.remove(job)
        self._queue = deque((other, seconds) for other, seconds in self._queue if other is not job)
        job.stopped.ring()
        if job.lease.end is None:
            self._run.decide(ev.LeaseReturned(job.lease.lease_id, cancelled=True))
        self._fill()
        self._worker.leases_came.ring()

    def used_s(self, begin_s: float, end_s: float) -> float:
        """Return the seconds between two moments in which its places were used, summed over all places."""
        return sum(max(0.0, min(end, end_s) - max(begun, begin_s)) for begun, end in self._worked)

    def _add(self, lease: LeaseRecord) -> None:
        group = range(self._run.state.rules.rollouts_per_group)
        job = _Job(lease, len(lease.slots) * len(group), [self._worker.held], Bell(self._run.time))
        self._jobs.append(job)
        self._queue += [(job, self._seconds(slot, number)) for slot in lease.slots for number in group]
        self._fill()

    def _fill(self) -> None:
        while self._queue and self._num_running < self._run.scenario.slots:
            self._num_running += 1
            self._run.time.start(self._complete(*self._queue.popleft()))

    def _complete(self, job: _Job, seconds: float) -> Process:
        begun_s = self._run.time.now_s
        while seconds > 0 and not job.is_cancelled:
            stalled_s = self.stalled_s
            yield job.stopped.within(seconds)
            seconds = self.stalled_s - stalled_s
        self._worked.append((begun_s, self._run.time.now_s))
        self._num_running -= 1
        job.left -= 1
        if job.is_cancelled:
            self._fill()
            self._worker.leases_came.ring()
            return
        if not job.left:
            self._jobs.remove(job)
            self._run.time.start(self._run.upload(job.lease, job.versions))
        self._fill()
        self._worker.leases_came.ring()
