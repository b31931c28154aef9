"""The coordinator's state machine: what it must do, and what must hold after any sequence of events."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants, records, scheduler, snapshot
from prime_node.coordinator.state.curriculum import Pool, Rating
from prime_node.coordinator.state.records import Banned, BundleForgotten, Effect, Settled, State, Topic, Woken
from prime_node.coordinator.state.scheduler import Grant, Refusal, choose_slots
from prime_node.coordinator.state.tick import tick
from prime_protocol.schedule import Selection, StalenessFrom, StalePolicy, lag_of, slots_ahead
from prime_protocol.verdict import BundleStatus, RejectReason


@pytest.fixture
def run() -> Run:
    """Two workers, policy 0."""
    run = Run()
    run.join("anna", "ben")
    run.publish()
    return run


def test_the_lowest_open_slots_are_leased_first_and_shared_fairly(run: Run) -> None:
    assert run.granted("anna", 0).slots == (0, 1, 2)
    assert run.granted("ben", 0).slots == (3, 4, 5)
    assert run.granted("ben", 0).slots == (6, 7, 8)


def test_one_worker_alone_gets_the_whole_step() -> None:
    run = Run()
    run.join("anna")
    run.publish()
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
    run = Run()
    run.join("anna")
    run.publish()
    steps = [run.granted("anna", 0).step for _ in range(3)]
    for lease in list(run.state.leases.values()):
        run.upload(lease)
    assert steps == [0, 1, 2]
    refusal = run.lease("anna", 0)
    assert isinstance(refusal, Refusal)
    assert refusal.is_worth_waiting


def test_a_worker_with_an_old_policy_is_told_to_fetch_the_new_one() -> None:
    run = Run(dataclasses.replace(RULES, async_level=0))
    run.join("anna")
    run.publish()
    run.train("anna", 0)
    refusal = run.lease("anna", 0)
    assert isinstance(refusal, Refusal)
    assert "fetch policy 1" in refusal.reason
    assert not refusal.is_worth_waiting
    assert run.granted("anna", 1).step == 1


def test_nothing_is_leased_beyond_the_last_step() -> None:
    run = Run(dataclasses.replace(RULES, max_steps=1))
    run.join("anna")
    run.publish()
    run.accept(run.upload(run.granted("anna", 0)))
    assert isinstance(run.lease("anna", 0), Refusal)
    assert not run.state.is_complete, "what no batch has taken may be taken back, and wanted again"
    assert run.fix()
    assert run.state.is_complete
    refusal = run.lease("anna", 0)
    assert isinstance(refusal, Refusal)
    assert "all rollouts of the run are in" in refusal.reason


def test_a_run_shorter_than_k_ends() -> None:
    run = Run(dataclasses.replace(RULES, max_steps=2, async_level=4))
    run.join("anna")
    run.publish()
    run.train("anna", 0)
    run.train("anna", 0)
    assert run.state.head == 2
    assert run.state.is_complete
    assert scheduler.waits_for(run.state) == []


def test_a_refused_slot_keeps_its_number_and_is_leased_next_with_another_attempt(run: Run) -> None:
    lease = run.granted("anna", 0)
    run.refuse(run.upload(lease), RejectReason.UNVERIFIABLE)
    again = run.granted("ben", 0)
    assert again.slots == lease.slots
    assert (lease.attempts, again.attempts) == ((0, 0, 0), (1, 1, 1))


def test_a_late_bundle_is_taken_while_nobody_else_was_leased_its_slots(run: Run) -> None:
    lease = run.granted("anna", 0)
    run.now_ms += RULES.lease_ms
    run.do(ev.LeasesExpired(scheduler.expired_leases(run.state, run.now_ms)))
    ended = run.state.lease_of(lease.lease_id, "anna")
    assert ended is not None
    assert run.state.is_redeemable(ended)
    run.accept(run.upload(ended))
    invariants.check(run.state)
    assert sorted(run.state.steps[0].accepted) == [0, 1, 2]


def test_a_late_bundle_is_refused_once_a_slot_has_gone_to_another(run: Run) -> None:
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
    assert Woken(Topic.LEASE) in run.do(ev.LeaseReturned(lease.lease_id))
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


def test_a_lost_worker_loses_its_leases_and_wakes_those_who_wait(run: Run) -> None:
    lease = run.granted("anna", 0)
    assert Woken(Topic.LEASE) in run.do(ev.WorkersLost(("anna",)))
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
        lambda run, lease: run.do(ev.WorkerLeft(lease.worker)),
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
            assert isinstance(refusal, Refusal)
            assert refusal.pause_s == pauses_s[-1]
            run.now_ms += pause_ms
    assert pauses_s == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    held = run.granted("anna", 0)
    assert isinstance(run.lease("anna", 0), Refusal), "one at a time"
    run.accept(run.upload(held))
    assert len(run.granted("anna", 0).slots) == 3, "an accepted bundle makes it like any other"


def test_a_worker_that_joins_again_starts_without_leases_but_keeps_its_record(run: Run) -> None:
    run.accept(run.upload(run.granted("anna", 0)))
    run.granted("anna", 0)
    run.join("anna")
    anna = run.state.workers["anna"]
    assert anna.leases == []
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
    assert Banned("anna", anna.banned) in effects
    assert anna.banned.evidence == bundles[1]
    settled = {effect.bundle: effect.reason for effect in effects if isinstance(effect, Settled)}
    assert settled == {bundles[1]: RejectReason.SEED_MISMATCH, bundles[2]: RejectReason.BANNED}
    assert held.lease_id not in run.state.leases
    assert run.granted("ben", 0).slots == (0, 1, 2, 3, 4, 5), "the whole step is open again, and ben is alone"
    invariants.check(run.state)


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
    run = Run(dataclasses.replace(RULES, strikes_max=1))
    run.join("anna", "ben")
    run.publish()
    evidence = run.upload(run.granted("anna", 0))
    run.refuse(evidence, RejectReason.SEED_MISMATCH)
    run.train("ben", 0)
    forgotten = run.do(ev.TrainerDurable(1))
    assert forgotten
    assert BundleForgotten(evidence) not in forgotten
    assert 0 not in run.state.steps


def test_the_trainer_is_woken_by_the_last_accepted_group_and_not_before() -> None:
    run = Run()
    run.join("anna", "ben")
    run.publish()
    bundles = [run.upload(run.granted(worker, 0)) for worker in ("anna", "ben")]
    assert Woken(Topic.BATCH) not in run.accept(bundles[0])
    assert Woken(Topic.BATCH) in run.accept(bundles[1])


def test_a_worker_whose_bundles_wait_for_validators_gets_no_more_work() -> None:
    run = Run(dataclasses.replace(RULES, bundles_pending_per_worker_max=1))
    run.join("anna")
    run.publish()
    bundle = run.upload(run.granted("anna", 0, rollouts_max=2))
    refusal = run.lease("anna", 0)
    assert isinstance(refusal, Refusal)
    assert "validator" in refusal.reason
    run.accept(bundle)
    assert run.granted("anna", 0).slots[0] == 1


def test_a_key_without_history_is_forgotten_when_it_leaves(run: Run) -> None:
    run.do(ev.WorkerLeft("anna"))
    assert "anna" not in run.state.workers


def test_a_draining_run_leases_nothing_more(run: Run) -> None:
    run.do(ev.DrainSet())
    assert isinstance(run.lease("anna", 0), Refusal)


def test_the_window_is_all_that_is_kept() -> None:
    run = Run(dataclasses.replace(RULES, max_steps=40, async_level=1))
    run.join("anna")
    run.publish()
    for step in range(30):
        run.train("anna", run.state.head)
        run.do(ev.TrainerDurable(step + 1))
    assert len(run.state.steps) == 2
    assert len(run.state.workers["anna"].ended) <= 64


def test_an_event_and_a_snapshot_survive_json(run: Run) -> None:
    run.granted("anna", 0)
    run.refuse(run.upload(run.granted("ben", 0)), RejectReason.STALE)
    for event, _ in run.log:
        assert ev.from_json(ev.to_json(event)) == event
    assert snapshot.from_json(snapshot.to_json(run.state)) == run.state


class AnyRun(RuleBasedStateMachine):
    """Random joins, crashes, expiries, refusals, bans and restarts. What must hold is checked after each of them."""

    @initialize(
        k=st.integers(0, 3),
        quarters=st.none() | st.integers(0, 10),
        mini_batch=st.integers(1, 3),
        num_batches=st.integers(1, 3),
        max_steps=st.integers(1, 6),
        strikes=st.integers(1, 3),
        selection=st.sampled_from(Selection),
        stale=st.sampled_from(StalePolicy),
        staleness_from=st.sampled_from(StalenessFrom),
        lag_slack=st.integers(0, 2),
        copies=st.integers(1, 3),
        slow_factor=st.none() | st.just(1.5),
        surety=st.integers(0, 3),
    )
    def begin(
        self,
        k: int,
        quarters: int | None,
        mini_batch: int,
        num_batches: int,
        max_steps: int,
        strikes: int,
        selection: Selection,
        stale: StalePolicy,
        staleness_from: StalenessFrom,
        lag_slack: int,
        copies: int,
        slow_factor: float | None,
        surety: int,
    ) -> None:
        size = mini_batch * num_batches
        eta = k if quarters is None else quarters / 4
        k = lag_of(eta)
        self.run_ = Run(
            dataclasses.replace(
                RULES,
                async_level=k,
                slots_ahead=None if quarters is None else slots_ahead(eta, size),
                groups_per_step=size,
                batches_per_step=num_batches,
                max_steps=max_steps,
                strikes_max=strikes,
                selection=selection,
                window_groups=2 * size if selection is Selection.WINDOW else 0,
                stale=stale,
                lag_max=None if stale is StalePolicy.KEEP else k + lag_slack,
                staleness_from=staleness_from,
                leases_per_slot_max=copies,
                slow_factor=slow_factor,
                audit_share_min=0.5 if surety else 1.0,
                surety_bundles=surety,
                newcomer_bundles=2,
            )
        )
        self.verdicts: dict[str, bool] = {}
        self.batches: dict[int, list[tuple[int, ...]]] = {}
        self.snapshot: tuple[int, str] = (0, snapshot.to_json(self.run_.state))
        self.run_.join("a", "b")
        self.run_.publish()

    @property
    def state(self) -> State:
        return self.run_.state

    @rule(name=st.sampled_from("abcd"), network=st.sampled_from(["", "x", "y"]))
    def join(self, name: str, network: str) -> None:
        worker = self.state.workers.get(name)
        if worker is None or worker.banned is None:
            self.run_.join(name, network=network)

    @rule(name=st.sampled_from("abcd"), lost=st.booleans())
    def go(self, name: str, lost: bool) -> None:
        worker = self.state.workers.get(name)
        if worker is not None and worker.active:
            self.run_.do(ev.WorkersLost((name,)) if lost else ev.WorkerLeft(name))

    @rule(name=st.sampled_from("abcd"), age=st.integers(0, 3), rollouts_max=st.integers(1, 20))
    def lease(self, name: str, age: int, rollouts_max: int) -> None:
        worker, version = self.state.workers.get(name), self.state.head - age
        if worker is not None and worker.active and version in self.state.published:
            now_ms = self.run_.now_ms
            found = choose_slots(self.state, worker, policy_version=version, rollouts_max=rollouts_max, now_ms=now_ms)
            if isinstance(found, Grant):
                assert len(found.slots) * self.state.rules.rollouts_per_group <= max(rollouts_max, 2)
                assert all(self.state.rules.admission.admits_slot(slot, version) for slot in found.slots)
                if self.state.rules.selection is Selection.IN_ORDER:
                    assert 0 <= found.step - version <= self.state.rules.async_level
                self.run_.lease(name, version, rollouts_max)

    @rule(data=st.data())
    def upload(self, data: st.DataObject) -> None:
        ended = [lease for worker in self.state.workers.values() if worker.active for lease in worker.ended.values()]
        leases = [lease for lease in [*self.state.leases.values(), *ended] if self.state.is_redeemable(lease)]
        if leases:
            self.run_.upload(data.draw(st.sampled_from(leases)), audited=data.draw(st.booleans()))

    def note(self, effects: list[Effect]) -> None:
        """A verdict is final, but that what was accepted may be taken back."""
        for effect in effects:
            if isinstance(effect, Settled):
                taken_back = effect.reason in (RejectReason.UNPROVEN, RejectReason.EQUIVOCATION)
                assert self.verdicts.get(effect.bundle, True), "settled twice"
                assert effect.bundle not in self.verdicts or taken_back
                self.verdicts[effect.bundle] = effect.status is BundleStatus.ACCEPTED

    @rule(data=st.data())
    def contradict(self, data: st.DataObject) -> None:
        ended = [lease for worker in self.state.workers.values() for lease in worker.ended.values() if worker.active]
        known = [lease for lease in ended if lease.bundle is not None and lease.reason is None]
        if leases := [*(pending.lease for pending in self.state.bundles.values()), *known]:
            lease = data.draw(st.sampled_from(leases))
            self.note(self.run_.do(ev.BundleContradicted(lease.lease_id, lease.worker, "another")))

    @rule(data=st.data(), reason=st.sampled_from([None, None, None, *RejectReason]))
    def judge(self, data: st.DataObject, reason: RejectReason | None) -> None:
        if self.state.bundles:
            bundle = data.draw(st.sampled_from(list(self.state.bundles)))
            assert bundle not in self.verdicts
            lease = self.state.bundles[bundle].lease
            swapped = data.draw(st.integers(lease.policy_version, self.state.head))  # a swap while it was generated
            versions = ((lease.policy_version, swapped),) * len(lease.slots) if data.draw(st.booleans()) else ()
            effects = self.run_.refuse(bundle, reason) if reason else self.run_.accept(bundle, versions)
            self.note(effects)
            filled = self.state.steps[lease.step].accepted if lease.step in self.state.steps else {}
            mine = [slot for slot in lease.slots if slot in filled and filled[slot].bundle == bundle]
            if mine and data.draw(st.booleans()):
                thrown_away = data.draw(st.sampled_from([None, Pool.EASY, Pool.HARD]))
                ratings = tuple(
                    Rating(slot, str(slot), "letters", slot, 0.5, Pool.NORMAL, thrown_away) for slot in mine
                )
                self.run_.do(ev.GroupsRated(lease.step, ratings))

    @rule(data=st.data())
    def hand_back(self, data: st.DataObject) -> None:
        if self.state.leases:
            self.run_.do(ev.LeaseReturned(data.draw(st.sampled_from(list(self.state.leases)))))

    @rule(ms=st.integers(0, 1_500))
    def let_time_pass(self, ms: int) -> None:
        self.run_.now_ms += ms
        if expired := scheduler.expired_leases(self.state, self.run_.now_ms):
            self.run_.do(ev.LeasesExpired(expired))
        assert all(lease.expires_at_ms > self.run_.now_ms for lease in self.state.leases.values())

    @rule()
    def train(self) -> None:
        head = self.state.head
        if head < self.state.rules.max_steps and not self.state.is_given(head + 1) and self.run_.fix():
            for number, batches in self.state.batches.items():
                self.batches.setdefault(number, copy.deepcopy(batches))
            if self.state.is_given(head):
                self.run_.publish()

    @rule(back=st.integers(0, 2))
    def save_checkpoint(self, back: int) -> None:
        durable = scheduler.forgettable_step(self.state, self.state.head - back)
        if durable > self.state.durable_step:
            self.run_.do(ev.TrainerDurable(durable))

    @rule(name=st.sampled_from("abcd"), ban=st.booleans())
    def operate(self, name: str, ban: bool) -> None:
        worker = self.state.workers.get(name)
        if worker is not None and (worker.banned is None) == ban:
            self.run_.do(ev.WorkerBanned(name, "why") if ban else ev.WorkerUnbanned(name))

    @rule(fresh=st.booleans())
    def restart(self, fresh: bool) -> None:
        if fresh:
            self.snapshot = (len(self.run_.log), snapshot.to_json(self.state))
        number, payload = self.snapshot
        restored = snapshot.from_json(payload)
        for event, at_ms in self.run_.log[number:]:
            tick(restored, ev.from_json(ev.to_json(event)), at_ms)
        assert restored == self.state
        self.run_.state = restored

    @invariant()
    def holds(self) -> None:
        invariants.check(self.state)
        for step, batches in self.batches.items():
            if self.state.is_given(step):
                assert self.state.batches[step] == batches, "a batch changed"
        given = [slot for batches in self.batches.values() for batch in batches for slot in batch]
        assert len(set(given)) == len(given), "a group was trained twice"
        for current in self.state.steps.values():
            for group in current.accepted.values():
                assert self.verdicts.get(group.bundle, True), "a refused bundle is trained on"

    def teardown(self) -> None:
        """Whatever happened, one honest worker and one validator bring the run to its end."""
        if not hasattr(self, "run_"):
            return
        run, rules = self.run_, self.state.rules
        self.run_.now_ms += 100_000
        run.join("zoe")
        for _ in range(20 * (rules.max_steps + 1) * (rules.groups_per_step + 2) + 200):
            if self.state.head >= rules.max_steps or self.state.draining:
                break
            if expired := scheduler.expired_leases(self.state, run.now_ms):
                run.do(ev.LeasesExpired(expired))
            for bundle in list(self.state.bundles):
                run.accept(bundle)
            if not self.state.is_given(self.state.head):
                run.fix()
            if self.state.is_given(self.state.head):
                run.publish()
            elif isinstance(lease := run.lease("zoe", self.state.head), records.LeaseRecord):
                run.upload(lease)
            run.now_ms += 1_000
        assert scheduler.waits_for(self.state) == [], "the run is wedged"


AnyRun.TestCase.settings = settings(
    max_examples=150, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_slot_is_lost_whatever_happens = AnyRun.TestCase
