"""The long tail: stragglers' groups leased twice, slow workers, and no bias against long rollouts."""

from __future__ import annotations

import dataclasses
import heapq
import random

import pytest
from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.state import batches, invariants
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import BundleForgotten, Settled
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord
from prime_node.coordinator.state.scheduler import NothingToLease
from prime_protocol.schedule import Selection, StalePolicy
from prime_protocol.verdict import BundleStatus, RejectReason

TWICE = dataclasses.replace(RULES, async_level=0, groups_per_step=4, leases_per_slot_max=2, max_steps=3, lease_ms=10**6)


def with_straggler() -> tuple[Run, LeaseRecord]:
    """Anna holds groups 0 and 1 of step 0; Ben has done the others, 100 ms per rollout, and finds nothing open."""
    run = Run(TWICE, workers=("anna", "ben"))
    slow, quick = run.granted("anna", 0, 4), run.granted("ben", 0, 4)
    run.now_ms += 400
    run.accept(run.upload(quick))
    assert isinstance(run.lease("ben", 0), NothingToLease), "she has taken no longer than he"
    run.now_ms += 500
    return run, slow


def test_a_stragglers_groups_are_leased_to_an_idle_worker_and_the_first_accepted_bundle_counts() -> None:
    run, slow = with_straggler()
    copy = run.granted("ben", 0, 4)
    assert copy.slots == slow.slots == (0, 1)
    first = run.upload(copy)
    run.accept(first)
    invariants.check_invariants(run.state)
    assert run.state.is_ready(0)
    assert {group.bundle for slot, group in run.state.steps[0].accepted.items() if slot in slow.slots} == {first}
    anna = run.state.workers["anna"]
    assert anna.leases == ()
    assert [(lease.lease_id, lease.end) for lease in anna.ended] == [(slow.lease_id, LeaseEnd.OVERTAKEN)]
    assert anna.wasted == 0, "it is no fault of hers"


def test_only_groups_of_a_straggler_that_block_others_are_leased_again() -> None:
    run, slow = with_straggler()
    run.join("carl")
    copy = run.granted("ben", 0, 2)
    assert copy.slots == (0,)
    assert run.granted("ben", 0, 4).slots == (1,), "of slot 0 he has a copy himself"
    assert isinstance(run.lease("carl", 0, 4), NothingToLease), "two work on each"
    run.accept(run.upload(copy))
    assert (slow.lease_id in run.state.leases, slow.slots) == (True, (0, 1))
    run.do(ev.WorkerLeft("ben"))
    run.now_ms += 500
    assert run.granted("carl", 0, 4).slots == (1,), "slot 0 is filled"


def test_a_worker_overtaken_after_its_upload_is_credited_and_its_bundle_is_not_trained_on() -> None:
    run, slow = with_straggler()
    copy = run.granted("ben", 0, 4)
    late, first = run.upload(slow), run.upload(copy)
    run.accept(first)
    effects = run.accept(late)
    assert [effect.status for effect in effects if isinstance(effect, Settled)] == [BundleStatus.ACCEPTED]
    assert run.state.workers["anna"].accepted == 4
    assert {group.bundle for group in run.state.steps[0].accepted.values()} == {first, "bundle-0"}
    invariants.check_invariants(run.state)


def test_a_late_copys_bytes_are_deleted_though_its_step_is_long_trained() -> None:
    run, slow = with_straggler()
    copy = run.granted("ben", 0, 4)
    late = run.upload(slow)
    run.accept(run.upload(copy))
    assert run.fix()
    run.publish()
    assert BundleForgotten(late) not in run.do(ev.TrainerDurable(1)), "a validator may be reading it"
    assert BundleForgotten(late) in run.refuse(late, RejectReason.UNVERIFIABLE)
    invariants.check_invariants(run.state)


def test_a_copy_that_fails_leaves_the_slot_with_the_first_worker() -> None:
    run, slow = with_straggler()
    copy = run.granted("ben", 0, 4)
    run.refuse(run.upload(copy), RejectReason.UNVERIFIABLE)
    assert run.state.steps[0].open == []
    invariants.check_invariants(run.state)
    run.accept(run.upload(slow))
    assert run.state.is_ready(0)


def test_a_slot_is_leased_no_more_often_than_allowed_and_never_twice_to_one_worker() -> None:
    run, _ = with_straggler()
    run.join("cleo")
    run.granted("ben", 0, 4)
    assert isinstance(run.lease("cleo", 0), NothingToLease)
    assert isinstance(run.lease("anna", 0), NothingToLease)


def paced() -> Run:
    """Steps take 1 s; anna takes 50 ms a rollout, ben 4 s: a group of two is 8 s, the last step of the window is 3 s away."""
    rules = dataclasses.replace(RULES, async_level=2, max_steps=20, slow_factor=2.0, lease_ms=10**6)
    run = Run(rules, workers=("anna", "ben"))
    for worker, ms in (("anna", 50.0), ("ben", 400.0)):
        run.state.workers[worker].rollout_ms = ms
    run.state.rollout_ms, run.state.step_ms = 60.0, 1_000.0
    return run


@pytest.mark.parametrize(
    ("rollout_ms", "step", "count"),
    [(50.0, 0, 3), (400.0, 0, 1), (600.0, 1, 1), (450.0, 0, 1), (1_400.0, 2, 1), (10_000.0, 2, 1), (250.0, 0, 2)],
)
def test_a_slow_worker_gets_what_it_can_finish_in_time(rollout_ms: float, step: int, count: int) -> None:
    run = paced()
    run.state.workers["ben"].rollout_ms = rollout_ms
    lease = run.granted("ben", 0)
    assert (lease.step, len(lease.slots)) == (step, count)


def test_a_slow_worker_takes_urgent_work_if_nothing_else_is_open_or_it_is_alone() -> None:
    run = paced()
    run.state.workers["ben"].rollout_ms = 10_000.0
    while isinstance(lease := run.lease("ben", 0), LeaseRecord) and lease.step == 2:
        run.upload(lease)
        run.state.workers["ben"].rollout_ms = 10_000.0
        for bundle in list(run.state.bundles):
            run.accept(bundle)
    assert isinstance(lease, LeaseRecord)
    assert lease.step == 1
    run.do(ev.WorkerLeft("anna"))
    assert run.granted("ben", 0).step == 0, "alone, it is as fast as it gets"


@pytest.mark.parametrize(
    ("selection", "stale"),
    [
        (Selection.IN_ORDER, StalePolicy.KEEP),
        (Selection.READY_FIRST, StalePolicy.KEEP),
        (Selection.WINDOW, StalePolicy.KEEP),
        (Selection.READY_FIRST, StalePolicy.WAIT),
        (Selection.LOWEST_VERSION_FIRST, StalePolicy.KEEP),
    ],
)
def test_long_rollouts_are_as_frequent_in_what_is_trained_as_in_what_was_asked_for(
    selection: Selection, stale: StalePolicy
) -> None:
    """tinker-cookbook #822: batches of the first ready groups exclude the long ones. Here a slot waits and is trained."""
    rules = dataclasses.replace(
        RULES,
        async_level=1,
        groups_per_step=16,
        max_steps=40,
        lease_ms=10**9,
        leases_per_worker_max=1_000,
        bundles_pending_per_worker_max=1_000,
        selection=selection,
        window_groups=48,
        stale=stale,
        lag_max=None if stale is StalePolicy.KEEP else 3,
    )
    run, rng = Run(rules), random.Random(5)
    names = [f"w{number}" for number in range(24)]
    run.join(*names)
    run.publish()
    took = {slot: rng.lognormvariate(0.0, 1.1) for slot in range(16 * 40)}
    is_long = {slot for slot, seconds in took.items() if seconds > 3.0}
    busy: list[tuple[float, str, str]] = []
    idle, now_s = set(names), 0.0
    trained: dict[int, int] = {}
    while run.state.head < rules.max_steps:
        for name in sorted(idle):
            lease = run.lease(name, run.state.head, rollouts_max=2)
            if isinstance(lease, LeaseRecord):
                idle.discard(name)
                heapq.heappush(busy, (now_s + took[lease.slots[0]], name, lease.lease_id))
        if not run.state.is_given(run.state.head) and run.fix():
            trained |= {slot: run.state.head for batch in run.state.batches[run.state.head] for slot in batch}
            run.publish()
            run.do(ev.TrainerDurable(batches.forgettable_step(run.state, run.state.head)))
            continue
        now_s, name, lease_id = heapq.heappop(busy)
        run.now_ms = 1_000 + round(now_s * 1_000)
        run.accept(run.upload(run.state.leases[lease_id]))
        idle.add(name)
    assert trained.keys() == took.keys(), "each group is trained exactly once"
    for first in range(0, 40, 10):  # and not only at the end of the run: each quarter trains its share
        steps = range(first, first + 10)
        asked = sum(slot // 16 in steps for slot in is_long)
        seen = sum(trained[slot] in steps for slot in is_long)
        assert abs(seen - asked) <= 0.25 * len(is_long) / 4 + 3, (first, asked, seen)
