"""A whole run on a virtual clock: the coordinator's own state machine and scheduler, with simulated workers and trainer.

Real: every decision (coordinator/state: choose_slots, choose_batch, tick, ...), the wake-ups that it causes, and the
measurements (coordinator/measure). Simulated: the duration of generating a group, of a request, an upload, a check, a
swap and a step of training, and the arrival of a policy at a worker. The loops follow worker/lease_work.py, training_data/feed.py
and trainer/loop.py: leases are requested ahead, batches are prefetched, a policy is published in parallel to the next
step.

Concurrency: workers wait for leases (the coordinator's bell or a pause). The trainer waits for a batch and, while more
than async_level policies are unpublished, for the publisher. No process waits for a policy longer than it is in transit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from heapq import heapify, heapreplace

from prime_lab.batching_worker import BatchingWorker, SimulatedWorker
from prime_lab.scenario import Scenario
from prime_lab.virtual_time import Bell, Process, VirtualTime, Within
from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.measure.tracker import StepLog, Tracker
from prime_node.coordinator.measure.zero_overhead import WaitingRules, Work, published_at
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import choose_batch, forgettable_step, next_step, stale_slots
from prime_node.coordinator.state.effects import Topic, Woken
from prime_node.coordinator.state.records import LeaseRecord, State
from prime_node.coordinator.state.scheduler import NothingToLease, choose_slots
from prime_node.coordinator.state.tick import tick
from prime_protocol.schedule import SwapPolicy

_NOTHING_S = 1e-6
"""Time below which a remainder is rounding error."""


class SimulatedRun:
    """A simulation of one run. Call `run`, then read its results."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.time = VirtualTime()
        self.state = State(scenario.rules)
        self.tracker = Tracker(self.state)
        self.steps: list[StepLog] = []
        self.published_s: list[float] = []
        """Publication times of policies 0, 1, ..."""
        self.train_seconds: list[float] = []
        """Training seconds of each step."""
        self.idle_seconds: list[float] = []
        """Seconds that the trainer waited in each step: for batches, and for the publisher."""
        self.dropped: list[int] = []
        """Slots of groups that were dropped as stale, once for each time."""
        self.num_events = 0
        self.engines: list[BatchingWorker] = []
        """The workers' engines, if they generate leases side by side."""
        self._bells = {topic: Bell(self.time) for topic in Topic}
        self._may_fetch_ahead = bool(self.state.rules.admission.lag_leased)
        room = 1 + (scenario.leases_ahead or 0) * self._may_fetch_ahead
        self._workers = [
            SimulatedWorker(f"w{number}", room, Bell(self.time), Bell(self.time))
            for number in range(scenario.num_workers)
        ]
        self._validators_free_s = [0.0] * scenario.costs.validators
        heapify(self._validators_free_s)
        self._batches: deque[tuple[int, ...]] = deque()
        self._batch_came, self._batch_taken, self._published = (Bell(self.time) for _ in range(3))
        self._to_publish: deque[int] = deque()
        self._submitted = Bell(self.time)

    def run(self) -> None:
        """Run until the last policy is published. Raises RuntimeError if the run deadlocks."""
        begins_s = self.scenario.first_lease_seconds or (lambda number: 0.0)
        for number, worker in enumerate(self._workers):
            self.decide(ev.WorkerJoined(worker.name, worker.name, "1", "engine", 64))
            self.time.start(self._lease_ahead(worker, begins_s(number)))
            if self.scenario.slots:
                engine = BatchingWorker(self, worker)
                self.engines.append(engine)
                self.time.start(engine.begin())
                self.time.start(engine.swap())
                if self.scenario.cancels:
                    self.time.start(engine.hear())
            else:
                self.time.start(self._generate(worker))
        self.time.start(self._publish())
        self.time.start(self._feed())
        self.time.start(self._train())
        self.time.run(until=lambda: self.state.head == self.scenario.num_steps)

    def replayed_s(self) -> list[float]:
        """Return when the policies would appear if only generation, training and the broadcast took time."""
        scenario, rules = self.scenario, self.state.rules
        num_groups = scenario.num_steps * scenario.groups_per_step
        return published_at(
            [Work(slot, 1, scenario.group_seconds(slot)) for slot in range(num_groups)],
            WaitingRules(rules.admission, rules.batches_per_step),
            workers=scenario.num_workers,
            train_seconds=lambda step: self.train_seconds[step],
            available_seconds=scenario.broadcast_seconds,
            num_steps=scenario.num_steps,
        )

    # The coordinator

    def decide(self, event: ev.Event) -> None:
        """Apply an event and carry out its effects."""
        self.num_events += 1
        effects = tick(self.state, event, self.time.now_ms)
        _, done = self.tracker.note(event, effects, self.state, self.time.now_ms)
        if done is not None:
            self.steps.append(done)
        for effect in effects:
            if isinstance(effect, Woken):
                self._bells[effect.topic].ring()

    def _ask_lease(
        self, worker: SimulatedWorker, policy_version: int
    ) -> Generator[Within, None, LeaseRecord | NothingToLease]:
        """Simulate `lease` of api/leasing.py, without the network."""
        deadline_s = self.time.now_s + self.scenario.costs.wait
        rollouts_max = self.scenario.groups_per_lease * self.state.rules.rollouts_per_group
        while True:
            found = choose_slots(
                self.state,
                self.state.workers[worker.name],
                policy_version=policy_version,
                rollouts_max=rollouts_max,
                now_ms=self.time.now_ms,
            )
            if not isinstance(found, NothingToLease):
                break
            left_s = deadline_s - self.time.now_s
            if not found.is_worth_waiting or left_s <= 0:
                return found
            yield self._bells[Topic.LEASE].within(left_s)
        lease_id = f"lease-{self.state.num_leases}"
        expires_ms = self.time.now_ms + self.state.rules.lease_ms
        digest = self.state.published[policy_version].digest
        self.decide(ev.LeaseGranted(lease_id, worker.name, found.step, policy_version, digest, found.slots, expires_ms))
        return self.state.leases[lease_id]

    def _fix_batch(self) -> tuple[int, ...] | None:
        """Simulate `_fix` of api/training.py."""
        step = next_step(self.state)
        durable = forgettable_step(self.state, min(max(0, self.state.head), step))
        if durable > self.state.durable_step:
            self.decide(ev.TrainerDurable(durable))
        if old := stale_slots(self.state, step):
            self.dropped += old
            self.decide(ev.GroupsDropped(old))
        chosen = choose_batch(self.state)
        if chosen is not None:
            self.decide(ev.BatchFixed(step, chosen))
        return chosen

    # Workers

    def _lease_ahead(self, worker: SimulatedWorker, after_s: float) -> Process:
        costs = self.scenario.costs
        if after_s:
            yield after_s
        while True:
            while worker.room == 0 or worker.latest < 0:
                yield worker.policy_came if worker.latest < 0 else worker.leases_came
            asked_s = self.time.now_s
            yield costs.request
            found = yield from self._ask_lease(worker, worker.latest)
            if isinstance(found, NothingToLease):
                if self.state.is_complete:
                    return
                yield max(costs.retry, found.pause_s)
                continue
            worker.pace.asked(self.time.now_s - asked_s)
            worker.room -= 1
            worker.line.append(found)
            worker.leases_came.ring()

    def _generate(self, worker: SimulatedWorker) -> Process:
        scenario = self.scenario
        swap = scenario.schedule.swap
        while True:
            while not worker.line:
                yield worker.leases_came
            lease = worker.line.popleft()
            if worker.held != lease.policy_version and not (swap.spans_policies and worker.held > lease.policy_version):
                yield scenario.costs.swap
                worker.held = lease.policy_version
            versions = [worker.held]
            is_room_given = self._fetches_ahead(worker)
            if is_room_given:
                worker.room += 1
                worker.leases_came.ring()
            began_s = self.time.now_s
            finished = yield from self._sample(worker, lease, versions)
            worker.pace.measured(rollouts=1, tokens=1, seconds=self.time.now_s - began_s)
            if finished:
                self.time.start(self.upload(lease, versions))
            else:
                self.decide(ev.LeaseReturned(lease.lease_id))
            if not is_room_given:
                worker.room += 1
            worker.leases_came.ring()

    def _fetches_ahead(self, worker: SimulatedWorker) -> bool:
        return self.scenario.leases_ahead is None and self._may_fetch_ahead and worker.pace.fetches_ahead

    def _sample(
        self, worker: SimulatedWorker, lease: LeaseRecord, versions: list[int]
    ) -> Generator[float | Within, None, bool]:
        """Generate a lease, with swaps during generation if the schedule has them.

        Return False if the lease is to be handed back.
        """
        costs, swap = self.scenario.costs, self.scenario.schedule.swap
        left_s = max(self.scenario.group_seconds(slot) for slot in lease.slots)
        if swap is SwapPolicy.DRAIN:
            yield left_s
            return True
        taken_s = 0.0
        while left_s > _NOTHING_S:
            began_s = self.time.now_s
            if worker.latest <= worker.held:
                yield worker.policy_came.within(left_s)
            passed_s = self.time.now_s - began_s
            left_s, taken_s = left_s - passed_s, taken_s + passed_s
            if left_s > _NOTHING_S and worker.latest > worker.held:
                if swap is SwapPolicy.ABORT_AND_REQUEUE:
                    return False
                worker.held = worker.latest
                yield costs.swap + (0.0 if swap is SwapPolicy.KEEP_KV else costs.recompute_share * taken_s)
                versions.append(worker.held)
        return True

    def upload(self, lease: LeaseRecord, versions: list[int]) -> Process:
        """Upload a bundle, and judge it as soon as a validator is free; not if another lease has filled its groups."""
        costs = self.scenario.costs
        yield costs.upload
        if not self.state.is_redeemable(lease):
            return
        bundle = "b" + lease.lease_id
        num_rollouts = len(lease.slots) * self.state.rules.rollouts_per_group
        self.decide(ev.BundleArrived(bundle, lease.lease_id, lease.worker, num_rollouts, 1))
        judged_s = max(self.time.now_s, self._validators_free_s[0]) + costs.check
        heapreplace(self._validators_free_s, judged_s)
        yield judged_s - self.time.now_s
        spanned = ((min(versions), versions[-1]),) * len(lease.slots)
        self.decide(ev.VerdictGiven(bundle, None, "", (1.0,) * num_rollouts, num_rollouts, "v", spanned))

    # The trainer

    def _feed(self) -> Process:
        """Keep one batch ahead of the one in training."""
        batches = self.scenario.num_steps * self.state.rules.batches_per_step
        for _ in range(batches):
            while self._batches:
                yield self._batch_taken
            yield self.scenario.costs.request
            while (chosen := self._fix_batch()) is None:
                yield self._bells[Topic.BATCH].within(self.scenario.costs.wait)
            self._batches.append(chosen)
            self._batch_came.ring()

    def _train(self) -> Process:
        self._submit(0)
        for step in range(self.scenario.num_steps):
            idle_s = trained_s = 0.0
            for _ in range(self.state.rules.batches_per_step):
                began_s = self.time.now_s
                while not self._batches:
                    yield self._batch_came
                idle_s += self.time.now_s - began_s
                chosen = self._batches.popleft()
                self._batch_taken.ring()
                seconds = self.scenario.train_seconds(step, chosen)
                trained_s += seconds
                yield seconds
            self.train_seconds.append(trained_s)
            self.idle_seconds.append(idle_s)
            began_s = self.time.now_s
            self._submit(step + 1)
            while len(self._to_publish) > self.state.rules.async_level:
                yield self._published
            self.idle_seconds[step] += self.time.now_s - began_s

    def _submit(self, policy_version: int) -> None:
        self._to_publish.append(policy_version)
        self._submitted.ring()

    def _publish(self) -> Process:
        while True:
            while not self._to_publish:
                yield self._submitted
            version = self._to_publish[0]
            yield self.scenario.costs.encode
            self.decide(ev.ManifestPublished(version, f"{version:064d}", (UpdateRoute(None, 1),)))
            self.published_s.append(self.time.now_s)
            self._to_publish.popleft()
            self._published.ring()
            self.time.start(self._deliver(version))

    def _deliver(self, policy_version: int) -> Process:
        yield self.scenario.broadcast_seconds
        for worker in self._workers:
            worker.latest = max(worker.latest, policy_version)
            worker.policy_came.ring()
