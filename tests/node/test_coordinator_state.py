"""The required behaviour of the coordinator's state machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.state import blockers, endings, invariants, records, scheduler, snapshot
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import BATCH_CHANGED, LEASE_CHANGED, BundleForgotten, Settled, WorkerWasBanned
from prime_node.coordinator.state.scheduler import NothingToLease
from prime_protocol.verdict import RejectReason


@pytest.fixture
def run() -> Run:
    """A state with two workers and policy 0."""
    return Run(workers=("anna", "ben"))


def test_a_worker_holds_no_more_leases_than_the_run_lets(run: Run) -> None:
    for _ in range(run.state.rules.leases_per_worker_max):
        run.granted("anna", 0, rollouts_max=2)
    refusal = run.lease("anna", 0, rollouts_max=2)
    assert isinstance(refusal, NothingToLease)
    assert refusal.reason == "you hold 3 leases, which is the limit"


def test_what_the_trainer_would_resume_with_is_kept(run: Run) -> None:
    for _ in range(2):
        run.train("anna", run.state.head)
    of_step = {number: set(run.state.steps[number].bundles) for number in (0, 1)}
    forgotten = {effect.bundle for effect in run.do(ev.TrainerDurable(1)) if isinstance(effect, BundleForgotten)}
    assert forgotten == of_step[0]
    assert of_step[1]
    assert list(run.state.batches) == [1]
    assert {effect.bundle for effect in run.do(ev.TrainerDurable(2)) if isinstance(effect, BundleForgotten)} == of_step[
        1
    ]


def test_the_lowest_open_slots_are_leased_first_and_shared_fairly(run: Run) -> None:
    assert run.granted("anna", 0).slots == (0, 1, 2)
    assert run.granted("ben", 0).slots == (3, 4, 5)
    assert run.granted("ben", 0).slots == (6, 7, 8)


def test_one_worker_alone_gets_the_whole_step() -> None:
    run = Run(workers=("anna",))
    assert run.granted("anna", 0).slots == (0, 1, 2, 3, 4, 5)


def test_a_fast_worker_takes_what_is_left_once_it_has_uploaded(run: Run) -> None:
    first = run.granted("anna", 0)
    assert run.granted("anna", 0).step == 1, "while it holds its share of step 0, it helps with the next one"
    run.upload(first)
    assert run.granted("anna", 0).slots == (3, 4, 5)


def test_a_lease_never_asks_for_more_than_the_worker_wants(run: Run) -> None:
    assert run.granted("anna", 0, rollouts_max=4).slots == (0, 1)


def test_a_group_is_never_split(run: Run) -> None:
    assert run.granted("anna", 0, rollouts_max=1).slots == (0,)


def test_a_policy_serves_its_own_step_and_k_later_ones_and_no_others() -> None:
    run = Run(workers=("anna",))
    steps = [run.granted("anna", 0).step for _ in range(3)]
    for lease in list(run.state.leases.values()):
        run.upload(lease)
    assert steps == [0, 1, 2]
    refusal = run.lease("anna", 0)
    assert isinstance(refusal, NothingToLease)
    assert refusal.is_worth_waiting


def test_a_worker_with_an_old_policy_learns_the_newest_one() -> None:
    run = Run(dataclasses.replace(RULES, async_level=0), workers=("anna",))
    run.train("anna", 0)
    refusal = run.lease("anna", 0)
    assert isinstance(refusal, NothingToLease)
    assert "policy 1 is the newest" in refusal.reason
    assert not refusal.is_worth_waiting
    assert run.granted("anna", 1).step == 1


def test_nothing_is_leased_beyond_the_last_step() -> None:
    run = Run(dataclasses.replace(RULES, max_steps=1), workers=("anna",))
    run.accept(run.upload(run.granted("anna", 0)))
    assert isinstance(run.lease("anna", 0), NothingToLease)
    assert not run.state.is_complete, "what no batch has taken may be taken back, and wanted again"
    assert run.fix()
    assert run.state.is_complete
    refusal = run.lease("anna", 0)
    assert isinstance(refusal, NothingToLease)
    assert "the run has all its rollouts" in refusal.reason


def test_a_run_shorter_than_k_ends() -> None:
    run = Run(dataclasses.replace(RULES, max_steps=2, async_level=4), workers=("anna",))
    run.train("anna", 0)
    run.train("anna", 0)
    assert run.state.head == 2
    assert run.state.is_complete
    assert blockers.waits_for(run.state) == []


def test_a_refused_slot_keeps_its_number_and_is_leased_next_with_another_attempt(run: Run) -> None:
    lease = run.granted("anna", 0)
    run.refuse(run.upload(lease), RejectReason.UNVERIFIABLE)
    again = run.granted("ben", 0)
    assert again.slots == lease.slots
    assert (lease.attempts, again.attempts) == ((0, 0, 0), (1, 1, 1))


def test_a_late_bundle_is_accepted_until_its_slots_are_leased_again(run: Run) -> None:
    lease = run.granted("anna", 0)
    run.now_ms += RULES.lease_ms
    run.do(ev.LeasesExpired(scheduler.expired_leases(run.state, run.now_ms)))
    ended = run.state.lease_of(lease.lease_id, "anna")
    assert ended is not None
    assert run.state.is_redeemable(ended)
    run.accept(run.upload(ended))
    invariants.check_invariants(run.state)
    assert sorted(run.state.steps[0].accepted) == [0, 1, 2]


def test_a_late_bundle_is_rejected_once_a_slot_is_leased_again(run: Run) -> None:
    lease = run.granted("anna", 0)
    run.do(ev.LeasesExpired((lease.lease_id,)))
    other = run.granted("ben", 0, rollouts_max=2)
    ended = run.state.lease_of(lease.lease_id, "anna")
    assert ended is not None
    assert not run.state.is_redeemable(ended)
    run.do(ev.LeasesExpired((other.lease_id,)))
    assert not run.state.is_redeemable(ended), "the other one might still upload too"


def test_a_returned_lease_cannot_be_redeemed(run: Run) -> None:
    lease = run.granted("anna", 0)
    assert LEASE_CHANGED in run.do(ev.LeaseReturned(lease.lease_id))
    ended = run.state.lease_of(lease.lease_id, "anna")
    assert ended is not None
    assert not run.state.is_redeemable(ended)
    assert run.granted("ben", 0).slots == lease.slots


def test_leases_expire_in_order_and_not_before_their_time(run: Run) -> None:
    first = run.granted("anna", 0)
    run.now_ms += 500
    second = run.granted("ben", 0)
    assert scheduler.expired_leases(run.state, run.now_ms + 499) == ()
    assert scheduler.expired_leases(run.state, run.now_ms + 500) == (first.lease_id,)
    assert scheduler.expired_leases(run.state, run.now_ms + 1_000) == (first.lease_id, second.lease_id)


def test_a_lost_worker_loses_its_leases_and_waiting_workers_wake(run: Run) -> None:
    lease = run.granted("anna", 0)
    assert LEASE_CHANGED in run.do(ev.WorkersLost(("anna",)))
    assert run.granted("ben", 0).slots[: len(lease.slots)] == lease.slots


def test_one_wasted_lease_is_forgiven(run: Run) -> None:
    run.do(ev.LeaseReturned(run.granted("anna", 0).lease_id))
    assert run.granted("anna", 0).slots == (0, 1, 2)


@pytest.mark.parametrize(
    "waste",
    [
        lambda run, lease: run.do(ev.LeaseReturned(lease.lease_id)),
        lambda run, lease: run.do(ev.LeasesExpired((lease.lease_id,))),
        lambda run, lease: run.do(ev.WorkersLost((lease.worker,))),
        lambda run, lease: run.join(lease.worker),
        lambda run, lease: run.refuse(run.upload(lease), RejectReason.INCOMPLETE),
    ],
)
def test_a_worker_that_wastes_its_leases_waits_ever_longer_for_one_group_at_a_time(
    run: Run, waste: Callable[[Run, records.LeaseRecord], object]
) -> None:
    pauses_s = []
    for number in range(9):
        lease = run.granted("anna", 0)
        assert len(lease.slots) == (3 if number < 2 else 1)
        waste(run, lease)
        run.join("anna")
        pause_ms = run.state.workers["anna"].pause_until_ms - run.now_ms
        pauses_s.append(max(0, pause_ms) // 1_000)
        if pauses_s[-1]:
            refusal = run.lease("anna", 0)
            assert isinstance(refusal, NothingToLease)
            assert refusal.pause_s == pauses_s[-1]
            run.now_ms += pause_ms
    assert pauses_s == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    held = run.granted("anna", 0)
    assert isinstance(run.lease("anna", 0), NothingToLease), "one at a time"
    run.accept(run.upload(held))
    assert len(run.granted("anna", 0).slots) == 3, "an accepted bundle makes it like any other"


def test_a_worker_that_joins_again_starts_without_leases_but_keeps_its_record(run: Run) -> None:
    run.accept(run.upload(run.granted("anna", 0)))
    run.granted("anna", 0)
    run.join("anna")
    anna = run.state.workers["anna"]
    assert anna.leases == ()
    assert anna.accepted == 6
    assert run.state.num_active == 2


def test_two_dishonest_bundles_ban_and_what_waits_is_refused(run: Run) -> None:
    bundles = [run.upload(run.granted("anna", 0)) for _ in range(3)]
    held = run.granted("anna", 0)
    run.refuse(bundles[0], RejectReason.LOGPROB_MISMATCH)
    assert run.state.workers["anna"].banned is None
    effects = run.refuse(bundles[1], RejectReason.SEED_MISMATCH)
    anna = run.state.workers["anna"]
    assert anna.banned is not None
    assert WorkerWasBanned("anna", anna.banned) in effects
    assert anna.banned.evidence == bundles[1]
    settled = {effect.bundle: effect.reason for effect in effects if isinstance(effect, Settled)}
    assert settled == {bundles[1]: RejectReason.SEED_MISMATCH, bundles[2]: RejectReason.BANNED}
    assert held.lease_id not in run.state.leases
    assert run.granted("ben", 0).slots == (0, 1, 2, 3, 4, 5), "the whole step is open again, and ben is alone"
    invariants.check_invariants(run.state)


@pytest.mark.parametrize("reason", [reason for reason in RejectReason if not reason.is_dishonest])
def test_bad_luck_is_no_strike(run: Run, reason: RejectReason) -> None:
    run.refuse(run.upload(run.granted("anna", 0)), reason)
    assert run.state.workers["anna"].strikes == 0


def test_an_unbanned_worker_may_join_again(run: Run) -> None:
    run.do(ev.WorkerBanned("anna", "by the operator"))
    assert run.state.num_active == 1
    run.do(ev.WorkerUnbanned("anna"))
    run.join("anna")
    assert run.granted("anna", 0).slots == (0, 1, 2)


def test_the_evidence_of_a_ban_outlives_its_step() -> None:
    run = Run(dataclasses.replace(RULES, strikes_max=1), workers=("anna", "ben"))
    evidence = run.upload(run.granted("anna", 0))
    run.refuse(evidence, RejectReason.SEED_MISMATCH)
    run.train("ben", 0)
    forgotten = run.do(ev.TrainerDurable(1))
    assert forgotten
    assert BundleForgotten(evidence) not in forgotten
    assert 0 not in run.state.steps


def test_the_trainer_is_woken_by_the_last_accepted_group_and_not_before() -> None:
    run = Run(workers=("anna", "ben"))
    bundles = [run.upload(run.granted(worker, 0)) for worker in ("anna", "ben")]
    assert BATCH_CHANGED not in run.accept(bundles[0])
    assert BATCH_CHANGED in run.accept(bundles[1])


def test_a_worker_whose_bundles_wait_for_validators_gets_no_more_work() -> None:
    run = Run(dataclasses.replace(RULES, bundles_pending_per_worker_max=1), workers=("anna",))
    bundle = run.upload(run.granted("anna", 0, rollouts_max=2))
    refusal = run.lease("anna", 0)
    assert isinstance(refusal, NothingToLease)
    assert "validator" in refusal.reason
    run.accept(bundle)
    assert run.granted("anna", 0).slots[0] == 1


def test_a_key_without_history_is_forgotten_when_it_leaves(run: Run) -> None:
    run.do(ev.WorkerLeft("anna"))
    assert "anna" not in run.state.workers


def test_a_draining_run_leases_nothing_more(run: Run) -> None:
    run.do(ev.DrainSet())
    assert isinstance(run.lease("anna", 0), NothingToLease)


def test_the_window_is_all_that_is_kept() -> None:
    run = Run(dataclasses.replace(RULES, max_steps=40, async_level=1), workers=("anna",))
    for step in range(30):
        run.train("anna", run.state.head)
        run.do(ev.TrainerDurable(step + 1))
    assert len(run.state.steps) == 2
    assert len(run.state.workers["anna"].ended) <= 64


def test_an_event_and_a_snapshot_survive_json(run: Run) -> None:
    run.granted("anna", 0)
    run.refuse(run.upload(run.granted("ben", 0)), RejectReason.STALE)
    for event, _ in run.log:
        assert ev.event_from_json(ev.event_to_json(event)) == event
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state


def test_where_many_take_part_fewer_ended_leases_of_each_are_remembered(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "LEASES_REMEMBERED_MIN", 1)
    monkeypatch.setattr(endings, "LEASES_REMEMBERED_TOTAL", 20)
    assert endings.leases_remembered(run.state) == 10
    run.join("cleo", "dora")
    assert endings.leases_remembered(run.state) == 8, "twice what a worker may have in hand"
    for _ in range(10):
        run.accept(run.upload(run.granted("anna", 0, rollouts_max=2)))
        run.fix()
    last = run.granted("anna", 0, rollouts_max=2)
    assert len(run.state.workers["anna"].ended) == 8
    run.accept(run.upload(last))
    assert run.state.lease_of(last.lease_id, "anna") is last
    invariants.check_invariants(run.state)
