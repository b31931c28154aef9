"""The coordinator's state machine and an upstream rule, driven by the same random events."""

from __future__ import annotations

import random

from tests.node.scheduler_world import Run
from tests.oracles.facts import Cancelling, Facts, Rule

from prime_node.coordinator.state import batches
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import LeaseRecord
from prime_node.coordinator.state.scheduler import cancelled_leases
from prime_protocol.verdict import RejectReason


class Pair:
    """A run of ours and an upstream rule. Each method compares one decision, and carries it out in both."""

    def __init__(self, run: Run, rule: Rule, facts: Facts, *, same_admission: bool = True) -> None:
        self.run, self.rule, self.facts = run, rule, facts
        self.same_admission = same_admission
        self.number_of: dict[int, int] = {}
        """Slot -> the number of its group."""
        self.leases: dict[int, LeaseRecord] = {}
        """Number -> the lease of a group in progress."""
        self.decisions = self.num_cancelled = 0
        run.join("fleet")
        run.publish()

    def begin(self) -> None:
        """Begin a group if ours may."""
        may = self.rule.may_begin(self.facts)
        found = self.run.lease("fleet", self.run.state.head, self.run.state.rules.rollouts_per_group)
        self.decisions += 1
        if self.same_admission:
            assert isinstance(found, LeaseRecord) == may, (self.facts, found)
        if isinstance(found, LeaseRecord):
            number = self.number_of.setdefault(found.slots[0], len(self.number_of))
            self.leases[number] = found
            self.facts.begin(number)

    def finish(self, number: int) -> None:
        """Accept a group."""
        self.run.accept(self.run.upload(self.leases.pop(number)))
        self.facts.finish(number)

    def fail(self, number: int) -> None:
        """Reject a group; it may be begun again."""
        self.run.refuse(self.run.upload(self.leases.pop(number)), RejectReason.UNVERIFIABLE)
        self.facts.forget([number])

    def take(self) -> bool:
        """Take the next batch. Return whether there was one."""
        run, state = self.run, self.run.state
        step = batches.next_step(state)
        assert (step, state.head) == (self.facts.step, self.facts.version)
        old = batches.stale_slots(state, step)
        assert self._numbers(old) == self.rule.stale(self.facts), (self.facts, old)
        self.facts.forget(self._numbers(old))
        if old:
            run.do(ev.GroupsDropped(old))
        chosen, theirs = batches.choose_batch(state), self.rule.batch(self.facts)
        self.decisions += 1
        assert (None if chosen is None else self._numbers(chosen)) == theirs, (self.facts, chosen)
        if chosen is not None and theirs is not None:
            run.do(ev.BatchFixed(step, chosen))
            self.facts.take(theirs)
        return chosen is not None

    def publish(self) -> None:
        """Publish the policy that the oldest unpublished step makes, if a step is taken."""
        if self.run.state.is_given(self.run.state.head):
            self.run.publish()
            self.facts.publish()
            self.run.do(ev.TrainerDurable(batches.forgettable_step(self.run.state, self.run.state.head)))
            if isinstance(self.rule, Cancelling):
                self._cancel(self.rule.cancelled(self.facts))

    def _cancel(self, theirs: set[int]) -> None:
        """Give back what can no longer be used."""
        held = [lease.lease_id for lease in self.leases.values()]
        named = set(cancelled_leases(self.run.state, "fleet", held))
        ours = {number for number, lease in self.leases.items() if lease.lease_id in named}
        self.decisions += len(held)
        assert ours == theirs, self.facts
        for number in ours:
            self.run.do(ev.LeaseReturned(self.leases.pop(number).lease_id, cancelled=True))
        self.facts.forget(ours)
        self.num_cancelled += len(ours)

    def _numbers(self, slots: tuple[int, ...]) -> set[int]:
        return {self.number_of[slot] for slot in slots}


def drive(pair: Pair, rng: random.Random, *, decisions: int, may_fail: bool, is_greedy: bool) -> None:
    """Let random events happen until so many decisions are compared.

    With `is_greedy`, a batch is taken as soon as it may be, also before earlier steps are published.
    """
    pace = rng.uniform(0.1, 1.0)
    while pair.decisions < decisions:
        event = rng.random()
        if event < 0.40:
            pair.begin()
        elif event < 0.43:
            if pair.leases and may_fail:
                pair.fail(rng.choice(list(pair.leases)))
        elif event < 0.43 + 0.27 * pace:
            if pair.leases:
                pair.finish(rng.choice(list(pair.leases)))
        elif event < 0.80 or is_greedy:
            pair.publish()
        elif not pair.run.state.is_given(pair.run.state.head):
            pair.take()
        while is_greedy and pair.take():
            pass
