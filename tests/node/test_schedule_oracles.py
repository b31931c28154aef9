"""Each preset against a small model of the framework it is named after, written from that framework's documentation and code.

A model has no slots: it counts in its framework's own terms. Hypothesis acts as the trainer, the workers and the network. After
every event both must agree whether another group may be begun, and which groups a batch takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.node.coordinator_world import make_run
from tests.node.scheduler_world import Run

from prime_node.coordinator.state.records import LeaseRecord
from prime_node.coordinator.state.rules import rules_of
from prime_protocol.schedule import slots_ahead
from prime_protocol.step import Admission
from prime_protocol.verdict import RejectReason


class Framework(Protocol):
    """A model of another framework's rule. Groups are numbered in the order in which they begin."""

    version: int

    def may_begin(self) -> bool: ...
    def begin(self, group: int) -> None: ...
    def finish(self, group: int) -> None: ...
    def fail(self, group: int) -> None: ...
    def take_batch(self) -> set[int] | None: ...
    def publish(self) -> None: ...


@dataclass
class PrimeRl:
    """docs/async.md: policy max(0, n - async_level) or newer generates batch n, counted from 0; batches train in order."""

    batch_size: int
    async_level: int
    version: int = 0
    batches: list[list[int]] = field(default_factory=list)
    finished: set[int] = field(default_factory=set)

    def may_begin(self) -> bool:
        full = bool(self.batches) and len(self.batches[-1]) == self.batch_size
        batch = len(self.batches) - (1 if self.batches and not full else 0)
        return self.version >= max(0, batch - self.async_level)

    def begin(self, group: int) -> None:
        if not self.batches or len(self.batches[-1]) == self.batch_size:
            self.batches.append([])
        self.batches[-1].append(group)

    def finish(self, group: int) -> None:
        self.finished.add(group)

    def fail(self, group: int) -> None:
        raise NotImplementedError("a failed example is sampled again inside its batch")

    def take_batch(self) -> set[int] | None:
        batch = set(self.batches[self.version]) if self.version < len(self.batches) else set()
        return batch if len(batch) == self.batch_size and batch <= self.finished else None

    def publish(self) -> None:
        self.version += 1


@dataclass
class Nemo(PrimeRl):
    """async-grpo guide: with max_trajectory_age_steps = a, a trajectory of version v trains steps v to v + a; each step waits
    for its own prompts."""

    def may_begin(self) -> bool:
        full = bool(self.batches) and len(self.batches[-1]) == self.batch_size
        target = len(self.batches) - (1 if self.batches and not full else 0)
        return target in range(self.version, self.version + self.async_level + 1)


@dataclass
class Verl:
    """verl/experimental/fully_async_policy: the rollouter pauses at max_required_samples; a sync resets the count to what is in
    flight and in the queue; the trainer takes require_batches mini-batches from the queue at a time, K times a sync."""

    mini_batch: int
    require_batches: int
    sync_step: int
    staleness_threshold: float
    version: int = 0
    staleness_samples: int = 0
    active: set[int] = field(default_factory=set)
    queue: list[int] = field(default_factory=list)

    @property
    def required_samples(self) -> int:
        return self.mini_batch * self.require_batches

    def may_begin(self) -> bool:
        max_required = int(self.required_samples * (self.staleness_threshold + 1) * self.sync_step)
        return self.staleness_samples < max_required

    def begin(self, group: int) -> None:
        self.active.add(group)
        self.staleness_samples += 1

    def finish(self, group: int) -> None:
        self.active.remove(group)
        self.queue.append(group)

    def fail(self, group: int) -> None:
        raise NotImplementedError("not described")

    def take_batch(self) -> set[int] | None:
        if len(self.queue) < self.required_samples:
            return None
        taken, self.queue = self.queue[: self.required_samples], self.queue[self.required_samples :]
        return set(taken)

    def publish(self) -> None:
        self.version += 1
        self.staleness_samples = len(self.active) + len(self.queue)


@dataclass
class Areal:
    """arXiv 2505.24298, equation 3, and StalenessManager.get_capacity: accepted + running < (eta + version + 1) * batch size.
    A rejected rollout counts no longer."""

    batch_size: int
    eta: int
    version: int = 0
    accepted: int = 0
    running: set[int] = field(default_factory=set)
    results: list[int] = field(default_factory=list)

    def may_begin(self) -> bool:
        return (self.eta + self.version + 1) * self.batch_size - (self.accepted + len(self.running)) > 0

    def begin(self, group: int) -> None:
        self.running.add(group)

    def finish(self, group: int) -> None:
        self.running.remove(group)
        self.accepted += 1
        self.results.append(group)

    def fail(self, group: int) -> None:
        self.running.remove(group)

    def take_batch(self) -> set[int] | None:
        if len(self.results) < self.batch_size:
            return None
        taken, self.results = self.results[: self.batch_size], self.results[self.batch_size :]
        return set(taken)

    def publish(self) -> None:
        self.version += 1


@dataclass
class PrimeRlLag1(Areal):
    """prime-rl since 2026: one batch ahead; every group has a counter that a weight update raises, in flight and in the queue
    alike; above max_off_policy_steps it is dropped and requested again."""

    max_off_policy_steps: int = 8
    ages: dict[int, int] = field(default_factory=dict)

    def begin(self, group: int) -> None:
        super().begin(group)
        self.ages[group] = 0

    def take_batch(self) -> set[int] | None:
        old = [group for group in self.results if self.ages[group] > self.max_off_policy_steps]
        self.results = [group for group in self.results if group not in old]
        self.accepted -= len(old)
        return super().take_batch()

    def publish(self) -> None:
        super().publish()
        self.ages = {group: age + 1 for group, age in self.ages.items()}


def ours(groups_per_step: int, *, async_level: int = 2, **schedule: object) -> Run:
    limits = {"leases_per_worker_max": 1_024, "bundles_pending_per_worker_max": 1_024}
    spec = {"groups_per_step": groups_per_step, "async_level": async_level, "schedule": schedule, "limits": limits}
    run = Run(rules_of(make_run(max_steps=1_000, **spec)))
    run.join("fleet")
    run.publish()
    return run


OPS = st.lists(
    st.tuples(st.sampled_from(["begin"] * 4 + ["finish"] * 4 + ["batch"] * 3 + ["fail"]), st.integers(0, 10**6)),
    max_size=120,
)


def compare(run: Run, theirs: Framework, ops: list[tuple[str, int]], *, may_fail: bool = False) -> None:
    """Apply the events to both."""
    running: dict[int, LeaseRecord] = {}
    of_slot: dict[int, int] = {}
    num_begun = 0
    for op, number in ops:
        assert theirs.version == run.state.head
        if op == "begin":
            lease = run.lease("fleet", run.state.head, rollouts_max=run.state.rules.rollouts_per_group)
            assert isinstance(lease, LeaseRecord) == theirs.may_begin(), f"group {num_begun} on policy {theirs.version}"
            if isinstance(lease, LeaseRecord):
                theirs.begin(num_begun)
                running[num_begun], of_slot[lease.slots[0]] = lease, num_begun
                num_begun += 1
        elif op == "finish" and running:
            group = sorted(running)[number % len(running)]
            run.accept(run.upload(running.pop(group)))
            theirs.finish(group)
        elif op == "fail" and running and may_fail:
            group = sorted(running)[number % len(running)]
            run.refuse(run.upload(running.pop(group)), RejectReason.UNVERIFIABLE)
            theirs.fail(group)
        elif op == "batch":
            before = {slot for batches in run.state.batches.values() for batch in batches for slot in batch}
            is_last = run.fix()
            batches = [batch for given in run.state.batches.values() for batch in given]
            taken = {of_slot[slot] for batch in batches for slot in batch if slot not in before}
            assert (taken or None) == theirs.take_batch(), "another batch"
            if is_last:
                run.publish()
                theirs.publish()


SMALL = st.integers(1, 4)
MANY = settings(max_examples=150, deadline=None)


@MANY
@given(size=SMALL, k=st.integers(0, 3), ops=OPS)
def test_prime_rl(size: int, k: int, ops: list[tuple[str, int]]) -> None:
    compare(ours(size, async_level=k, preset="prime_rl"), PrimeRl(size, k), ops)


@MANY
@given(size=SMALL, lag=st.integers(0, 3), ops=OPS)
def test_prime_rl_with_one_batch_ahead(size: int, lag: int, ops: list[tuple[str, int]]) -> None:
    run = ours(size, async_level=1, preset="prime_rl_lag1", max_off_policy_steps=lag)
    compare(run, PrimeRlLag1(size, 1, max_off_policy_steps=lag), ops, may_fail=True)


@MANY
@given(size=SMALL, age=st.integers(1, 3), ops=OPS)
def test_nemo_async(size: int, age: int, ops: list[tuple[str, int]]) -> None:
    run = ours(size, async_level=age, preset="nemo_async", max_trajectory_age_steps=age)
    compare(run, Nemo(size, age), ops)


@MANY
@given(size=SMALL, eta=st.integers(0, 4), ops=OPS)
def test_areal(size: int, eta: int, ops: list[tuple[str, int]]) -> None:
    run = ours(size, async_level=eta, preset="areal", max_head_offpolicyness=eta)
    compare(run, Areal(size, eta), ops, may_fail=True)


@pytest.mark.parametrize("preset", ["verl_on_policy", "verl_stream", "verl_stale", "verl_partial"])
@MANY
@given(mini_batch=SMALL, require=st.integers(1, 2), sync=st.integers(1, 4), quarters=st.integers(0, 8), ops=OPS)
def test_verl(preset: str, mini_batch: int, require: int, sync: int, quarters: int, ops: list[tuple[str, int]]) -> None:
    """Its four modes are one rule with different numbers."""
    sync = 1 if preset == "verl_on_policy" else sync
    eta = 0.0 if preset in ("verl_on_policy", "verl_stream") else quarters / 4
    changes = {"trigger_parameter_sync_step": sync, "require_batches": require, "staleness_threshold": eta}
    run = ours(mini_batch * require * sync, async_level=-int(-eta // 1), preset=preset, **changes)
    compare(run, Verl(mini_batch, require, sync, eta), ops)


# The worked examples of their documentation


def test_a_trajectory_of_version_10_may_train_steps_10_and_11_and_not_12() -> None:
    """NeMo-RL, async GRPO guide, max_trajectory_age_steps = 1."""
    rule = make_run(async_level=1, groups_per_step=1, schedule={"preset": "nemo_async"}).spec.admission
    assert [rule.admits_slot(step, 10) for step in (10, 11, 12)] == [True, True, False]
    assert [rule.check_trained(step, 10) is None for step in (10, 11, 12)] == [True, True, False]


@pytest.mark.parametrize("age", [1, 2, 4])
def test_what_is_begun_and_not_trained_fits_into_nemos_buffer(age: int) -> None:
    """NeMo-RL sizes its replay buffer for prompts per step x age x 2."""
    prompts = 8
    rule = make_run(groups_per_step=prompts, async_level=age, schedule={"staleness_threshold": age}).spec.admission
    outstanding = max(rule.slots_end(version) - version * prompts for version in range(20))
    assert outstanding == prompts * (age + 1) <= prompts * age * 2


@pytest.mark.parametrize("age", [1, 2, 3])
def test_what_nemos_code_allows_is_a_part_of_what_its_documentation_allows(age: int) -> None:
    """In its code a version other than the first does not serve its own step, so a step can stay without rollouts forever
    (NeMo-RL #3238). Here, a step's own version may serve it if it lacks rollouts."""
    rule = Admission(groups_per_step=1, slots_ahead=1 + age, is_in_order=True)
    for version in range(6):
        theirs = range(age + 1) if version == 0 else range(version + 1, version + age + 1)
        assert all(rule.admits_slot(target, version) for target in theirs)
        assert rule.admits_slot(version, version)


@pytest.mark.parametrize(
    ("eta", "sync", "require", "mini_batch", "left_over", "rollout_num"),
    [
        (0.5, 4, 1, 32, 0, 192),
        (0.5, 4, 1, 32, 40, 152),
        (0.3, 4, 4, 32, 0, 665),
        (0.1, 1, 1, 10, 0, 11),
        (1, 2, 1, 8, 3, 29),
    ],
)
def test_verls_formula_of_how_many_samples_a_policy_begins(
    eta: float, sync: int, require: int, mini_batch: int, left_over: int, rollout_num: int
) -> None:
    """rollout_num = (1 + staleness_threshold) * (K * require_batches * ppo_mini_batch_size) - num_staleness_sample."""
    size = sync * require * mini_batch
    rule = Admission(size, slots_ahead(eta, size), is_in_order=False)
    version = 7
    first = version * size + left_over  # what is left over was begun before, and is not trained
    assert sum(rule.admits_slot(slot, version) for slot in range(first, first + 3 * size)) == rollout_num


@pytest.mark.parametrize("eta", [0, 0.1, 0.25, 0.3, 0.5, 1, 1.7, 2, 3.5])
def test_the_rule_is_the_published_formula(eta: float) -> None:
    """v >= max(0, ceil((m + 1) / R - 1 - eta)), in whole numbers: tenths of a step are tenths."""
    tenths = round(eta * 20)
    for size in (1, 3, 10, 32):
        rule = Admission(size, slots_ahead(eta, size), is_in_order=False)
        for slot in range(5 * size):
            oldest = max(0, -(-(20 * (slot + 1) - 20 * size - tenths * size) // (20 * size)))
            assert [rule.admits_slot(slot, version) for version in range(-1, 8)] == [v >= oldest for v in range(-1, 8)]
