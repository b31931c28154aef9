"""Invariants of the coordinator's state after any sequence of events; and every run reaches its end."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.state import blockers, invariants, records, scheduler, snapshot
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import forgettable_step, next_step, stale_slots
from prime_node.coordinator.state.curriculum import Pool, Rating
from prime_node.coordinator.state.effects import Effect, Settled
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.scheduler import Grant, choose_slots
from prime_node.coordinator.state.tick import tick
from prime_protocol.schedule import Selection, StalenessFrom, StalePolicy, slots_ahead
from prime_protocol.verdict import BundleStatus, RejectReason


class AnyRun(RuleBasedStateMachine):
    """Apply random joins, crashes, expiries, refusals, bans and restarts. Check the invariants after each event."""

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
        escrow=st.integers(0, 3),
        run_ahead=st.none() | st.integers(0, 2),
        inflight=st.none() | st.integers(1, 6),
        spans=st.booleans(),
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
        escrow: int,
        run_ahead: int | None,
        inflight: int | None,
        spans: bool,
    ) -> None:
        size = mini_batch * num_batches
        eta = k if quarters is None else quarters / 4
        k = math.ceil(eta)
        ahead = None if quarters is None else slots_ahead(eta, size)
        if selection is Selection.IN_ORDER or inflight is None:
            run_ahead = None
        elif run_ahead is not None:
            ahead = size * (1 + run_ahead) + inflight
            k = -(-ahead // size) - 1
        self.run_ = Run(
            dataclasses.replace(
                RULES,
                async_level=k,
                slots_ahead=ahead,
                max_run_ahead=run_ahead,
                inflight_max=inflight,
                groups_per_step=size,
                batches_per_step=num_batches,
                max_steps=max_steps,
                strikes_max=strikes,
                selection=selection,
                window_groups=2 * size if selection is Selection.WINDOW else 0,
                stale=stale,
                lag_max=None if stale is StalePolicy.KEEP else k + lag_slack,
                staleness_from=staleness_from,
                spans=spans,
                leases_per_slot_max=copies,
                slow_factor=slow_factor,
                audit_share_min=0.5 if escrow else 1.0,
                escrow_bundles=escrow,
                newcomer_bundles=2,
            )
        )
        self.verdicts: dict[str, bool] = {}
        self.batches: dict[int, list[tuple[int, ...]]] = {}
        self.snapshot: tuple[int, str] = (0, snapshot.state_to_json(self.run_.state))
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
        ended = [lease for worker in self.state.workers.values() if worker.active for lease in worker.ended]
        leases = [lease for lease in [*self.state.leases.values(), *ended] if self.state.is_redeemable(lease)]
        if leases:
            self.run_.upload(data.draw(st.sampled_from(leases)), audited=data.draw(st.booleans()))

    def note(self, effects: list[Effect]) -> None:
        """A verdict is final, except that an accepted bundle may be revoked."""
        for effect in effects:
            if isinstance(effect, Settled):
                taken_back = effect.reason in (RejectReason.UNPROVEN, RejectReason.EQUIVOCATION)
                assert self.verdicts.get(effect.bundle, True), "settled twice"
                assert effect.bundle not in self.verdicts or taken_back
                self.verdicts[effect.bundle] = effect.status is BundleStatus.ACCEPTED

    @rule(data=st.data())
    def contradict(self, data: st.DataObject) -> None:
        ended = [lease for worker in self.state.workers.values() for lease in worker.ended if worker.active]
        known = [lease for lease in ended if lease.bundle is not None and lease.reason is None]
        if leases := [*(pending.lease for pending in self.state.bundles.values()), *known]:
            lease = data.draw(st.sampled_from(leases))
            assert lease.bundle is not None
            receipt = () if lease.bundle in self.state.bundles else (ev.Replaced(lease.bundle, None),)
            self.note(self.run_.do(ev.BundleContradicted(lease.lease_id, lease.worker, "another", receipt)))

    @rule(data=st.data(), reason=st.sampled_from([None, None, None, *RejectReason]))
    def judge(self, data: st.DataObject, reason: RejectReason | None) -> None:
        if self.state.bundles:
            bundle = data.draw(st.sampled_from(list(self.state.bundles)))
            assert bundle not in self.verdicts
            lease = self.state.bundles[bundle].lease
            swapped = data.draw(st.integers(lease.policy_version, self.state.head))  # a swap while it was generated
            spans = self.state.rules.spans and data.draw(st.booleans())
            versions = ((lease.policy_version, swapped),) * len(lease.slots) if spans else ()
            effects = self.run_.refuse(bundle, reason) if reason else self.run_.accept(bundle, versions)
            self.note(effects)
            filled = self.state.steps[lease.step].accepted if lease.step in self.state.steps else {}
            mine = [slot for slot in lease.slots if slot in filled and filled[slot].bundle == bundle]
            if data.draw(st.booleans()) and mine:
                thrown_away = data.draw(st.sampled_from([None, Pool.EASY, Pool.HARD]))
                ratings = tuple(
                    Rating(slot, str(slot), "letters", slot, 0.5, Pool.NORMAL, thrown_away) for slot in mine
                )
                self.run_.do(ev.GroupsRated(lease.step, ratings))

    @rule(data=st.data(), failed=st.booleans())
    def hand_back(self, data: st.DataObject, failed: bool) -> None:
        if self.state.leases:
            lease = data.draw(st.sampled_from(list(self.state.leases.values())))
            self.run_.do(ev.LeaseReturned(lease.lease_id))
            if failed:
                self.run_.do(ev.EpisodesFailed(lease.worker, lease.slots, is_judged=data.draw(st.booleans())))

    @rule(data=st.data(), finished=st.booleans())
    def cancel(self, data: st.DataObject, finished: bool) -> None:
        """A useless lease is given back at no cost; if it is finished, its groups are dropped."""
        if useless := [lease for lease in self.state.leases.values() if scheduler.is_useless(self.state, lease)]:
            lease = data.draw(st.sampled_from(useless))
            worker = self.state.workers[lease.worker]
            assert scheduler.cancelled_leases(self.state, lease.worker, worker.leases).count(lease.lease_id) == 1
            if finished:
                self.note(self.run_.accept(self.run_.upload(lease)))
                filled = self.state.steps[lease.step].accepted
                mine = {
                    slot
                    for slot in lease.slots
                    if slot in filled and filled[slot].policy_version == lease.policy_version
                }
                assert mine <= {*stale_slots(self.state, next_step(self.state))} | {*self.state.steps[lease.step].taken}
                return
            before = (worker.wasted, worker.abandoned, worker.audit_score, worker.pause_until_ms)
            self.run_.do(ev.LeaseReturned(lease.lease_id, cancelled=True))
            assert (worker.wasted, worker.abandoned, worker.audit_score, worker.pause_until_ms) == before
            assert not scheduler.is_outdated(self.state, self.state.head), "nothing could be leased"

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
        durable = forgettable_step(self.state, self.state.head - back)
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
            self.snapshot = (len(self.run_.log), snapshot.state_to_json(self.state))
        number, payload = self.snapshot
        restored = snapshot.state_from_json(payload)
        for event, at_ms in self.run_.log[number:]:
            tick(restored, ev.event_from_json(ev.event_to_json(event)), at_ms)
        assert restored == self.state
        self.run_.state = restored

    @invariant()
    def holds(self) -> None:
        invariants.check_invariants(self.state)
        for step, batches in self.batches.items():
            if self.state.is_given(step):
                assert self.state.batches[step] == batches, "a batch changed"
        given = [slot for batches in self.batches.values() for batch in batches for slot in batch]
        assert len(set(given)) == len(given), "a group was trained twice"
        for current in self.state.steps.values():
            for group in current.accepted.values():
                assert self.verdicts.get(group.bundle, True), "a refused bundle is trained on"

    def teardown(self) -> None:
        """After any events, one honest worker and one validator can finish the run."""
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
        assert blockers.waits_for(self.state) == [], "the run is wedged"


AnyRun.TestCase.settings = settings(
    max_examples=150, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
)
test_no_slot_is_lost_whatever_happens = pytest.mark.slow(AnyRun.TestCase)
