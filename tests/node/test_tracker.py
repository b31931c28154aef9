"""The coordinator's report on overlap: the tracker's numbers for a run with known times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.node.scheduler_world import RULES, Run

from prime_node.adapters.prometheus_metrics import PrometheusMetrics
from prime_node.coordinator.measure.observer import STEPS_COMPARED, Observer, coordinator_row
from prime_node.coordinator.measure.tracker import Span, SpanKind, StepLog, Tracker
from prime_node.coordinator.metrics import METRICS
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import Effect
from prime_node.coordinator.state.rules import SchedulerRules
from prime_protocol.schedule import Selection, StalePolicy
from prime_protocol.verdict import RejectReason


class Observed(Run):
    """A run that reports all events to its tracker."""

    def __init__(self, rules: SchedulerRules = RULES) -> None:
        super().__init__(rules)
        self.tracker = Tracker(self.state)
        self.spans: list[Span] = []
        self.steps: list[StepLog] = []

    def do(self, event: ev.Event) -> list[Effect]:
        effects = super().do(event)
        spans, done = self.tracker.note(event, effects, self.state, self.now_ms)
        self.spans += spans
        self.steps += [done] if done is not None else []
        return effects

    def of(self, kind: SpanKind) -> list[Span]:
        return [span for span in self.spans if span.kind is kind]


def test_a_step_is_reported_with_its_times() -> None:
    run = Observed()
    run.join("anna", "ben")
    run.publish()
    first = run.granted("anna", 0, 6)  # three groups of two each: a worker's share
    run.now_ms += 1_000
    second = run.granted("ben", 0, 6)
    run.now_ms += 1_000
    bundle = run.upload(first)
    run.now_ms += 500
    run.accept(bundle)
    run.now_ms += 1_500
    run.accept(run.upload(second))
    run.now_ms += 1_000
    assert run.fix()
    run.publish()

    [step] = run.steps
    assert (step.step, step.seconds) == (0, 5.0)
    # anna held a lease for 2 s and ben for 3 s, of the 5 s that both were there
    assert step.idle_ratio == pytest.approx(1 - (2 + 3) / 10)
    assert step.workers_mean == pytest.approx(2.0)
    assert step.lags == {0: 6}
    assert sorted(step.generate_seconds) == [2.0] * 3 + [3.0] * 3
    assert sorted(step.queue_seconds) == [1.0] * 3 + [2.5] * 3
    assert sorted(step.check_seconds) == [0.0, 0.5]
    assert [span.seconds for span in run.of(SpanKind.LEASE)] == [2.0, 3.0]
    assert [span.policy_version for span in run.of(SpanKind.POLICY)] == [0, 1]


def test_a_lease_that_waited_its_turn_is_timed_from_the_bundle_before_it() -> None:
    run = Observed()
    run.join("anna")
    run.publish()
    first, second = run.granted("anna", 0, 2), run.granted("anna", 0, 2)
    run.now_ms += 700
    run.upload(first)
    run.now_ms += 300
    run.upload(second)
    assert [span.seconds for span in run.of(SpanKind.LEASE)] == [0.7, 0.3]


def test_refusals_wasted_leases_and_dropped_groups_are_counted_by_reason() -> None:
    run = Observed(replace(RULES, selection=Selection.READY_FIRST, lag_max=0, stale=StalePolicy.DROP, async_level=1))
    run.join("anna", "ben")
    run.publish()
    run.refuse(run.upload(run.granted("anna", 0, 2)), RejectReason.WRONG_POLICY)
    run.do(ev.LeaseReturned(run.granted("ben", 0, 2).lease_id))
    run.do(ev.LeasesExpired((run.granted("ben", 0, 2).lease_id,)))
    while run.state.num_ready < 9:  # three more than a step takes: they are too old for the next one
        run.accept(run.upload(run.granted("anna", 0, 2)))
    assert run.fix()
    run.publish()
    run.fix()
    run.join("carl")
    while not run.fix():
        run.accept(run.upload(run.granted("carl", 1, 2)))
    run.publish()
    early, late = run.steps
    assert early.refused == {"wrong_policy": 1}
    assert early.wasted == {"returned": 1, "lapsed": 1}
    assert late.dropped == {"stale": 3}
    assert [span.outcome for span in run.of(SpanKind.LEASE)][:3] == ["redeemed", "returned", "lapsed"]
    row = coordinator_row(late, head=2, num_generated=run.state.num_accepted_groups, num_dropped=3)
    assert row["dropped/stale"] == row["fully_async/count/dropped_stale_samples"] == 3
    assert row["fully_async/count/current_param_version"] == 2


def test_bundles_rejected_without_or_against_a_verdict_are_reported_and_forgotten() -> None:
    run = Observed()
    run.join("anna", "ben")
    run.publish()
    mark = "m" * 24
    for worker in ("anna", "ben"):
        lease = run.granted(worker, 0, 2)
        rewards = (0.5,) * (len(lease.slots) * run.state.rules.rollouts_per_group)
        bundle = run.upload(lease)
        run.do(ev.VerdictGiven(bundle, None, "", rewards, 10, "v", fingerprints=((lease.slots[0], mark),)))
        run.now_ms += 1_000
    assert [span.outcome for span in run.of(SpanKind.CHECK)] == ["accepted", "copied"]
    run.upload(run.granted("ben", 0, 2))
    run.do(ev.WorkerBanned("ben", "by the operator"))
    assert not run.tracker.judged


def test_an_overtaken_lease_of_a_straggler_is_reported_as_such() -> None:
    run = Observed(replace(RULES, leases_per_slot_max=2, straggler_factor=1.0))
    run.join("anna", "ben")
    run.publish()
    run.accept(run.upload(run.granted("anna", 0, 2)))
    run.now_ms += 10
    run.accept(run.upload(run.granted("anna", 0, 2)))
    slow = run.granted("ben", 0, 2)
    copied = None
    while copied is None:
        run.now_ms += 10
        lease = run.granted("anna", 0, 2)
        copied = lease if lease.slots == slow.slots else None
        run.accept(run.upload(lease))
    assert "overtaken" in [span.outcome for span in run.of(SpanKind.LEASE)]


def test_a_restart_during_a_step_keeps_the_counts() -> None:
    run = Observed()
    run.join("anna")
    run.publish()
    leases = [run.granted("anna", 0, 4) for _ in range(3)]
    waiting = run.upload(leases[0])
    run.tracker = Tracker(run.state)
    run.now_ms += 2_000
    run.accept(waiting)
    for lease in leases[1:]:
        run.accept(run.upload(lease))
    run.fix()
    run.publish()
    assert run.steps == []  # its start was not recorded
    run.train("anna", 1)
    assert [step.step for step in run.steps] == [1]


class Kept:
    """Recorder that implements observe.Recorder."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def record(self, **fields: Any) -> None:
        self.rows.append(fields)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class UntrustedRow(Run):
    """A run with the daemon's observer."""

    def __init__(self, rules: SchedulerRules) -> None:
        super().__init__(rules)
        self.rows, self.lines, self.metrics = Kept(), Kept(), PrometheusMetrics()
        self.metrics.declare(*METRICS)
        self.observer = Observer(Tracker(self.state), self.metrics, rows=self.rows, timeline=self.lines)

    def do(self, event: ev.Event) -> list[Effect]:
        effects = super().do(event)
        self.observer.note(event, effects, self.state, self.now_ms)
        return effects


@pytest.mark.parametrize(("lost_ms", "closeness"), [(0, 1.0), (500, 5 / 6)])
def test_closeness_is_the_replayed_time_over_the_measured_time(lost_ms: int, closeness: float) -> None:
    run = UntrustedRow(replace(RULES, async_level=0, max_steps=20))
    run.join("anna")
    run.publish()
    for version in range(STEPS_COMPARED):
        run.observer.usable("anna", version, 0.0, run.now_ms)
        run.now_ms += lost_ms
        lease = run.granted("anna", version, 12)
        run.now_ms += 2_000  # generating
        bundle = run.upload(lease)
        run.now_ms += lost_ms // 2
        run.accept(bundle)
        assert run.fix()
        run.observer.trained(version + 1, 0.5)
        run.now_ms += 500 - lost_ms // 2  # training; some of the loss was here
        run.publish()
    assert all("closeness" not in row for row in run.rows.rows[:-1])
    assert run.rows.rows[-1]["closeness"] == pytest.approx(closeness)


def test_what_a_run_did_is_a_row_a_step_lines_and_histograms() -> None:
    run = UntrustedRow(RULES)
    run.join("anna")
    run.publish()
    run.observer.made(0, run.now_ms - 50)
    run.now_ms += 200
    run.observer.usable("liar", 0, 3_600.0, run.now_ms)
    run.observer.usable("anna", 0, 0.25, run.now_ms, swap_s=0.125)
    run.observer.usable("ben", 0, 0.25, run.now_ms)
    run.observer.usable("boaster", 0, 0.01, run.now_ms, swap_s=3_600.0)
    run.train("anna", 0)
    run.train("anna", 0)
    first, second = run.rows.rows
    assert (first["step"], first["lag_max"], first["lag/0"]) == (0, 0, 6)
    assert (second["step"], second["lag_max"], second["lag/1"]) == (1, 1, 6)
    assert (first["broadcast_seconds"], first["swap_seconds"]) == (0.25, 0.125)
    assert {"rollouter/idle_ratio", "fully_async/processing_time/tp95", "queue_age_seconds_max"} <= first.keys()
    assert [line["kind"] for line in run.lines.rows][:5] == ["policy", "usable", "usable", "usable", "lease"]
    assert run.lines.rows[4]["name"] == "anna"
    text = run.metrics.exposition()[0].decode()
    assert 'prime_group_lag_bucket{le="0.0"} 6.0' in text
    assert 'prime_group_lag_bucket{le="1.0"} 12.0' in text
    assert "prime_policy_swap_seconds_sum 0.125" in text


def test_groups_that_are_taken_back_from_a_cheat_are_reported_as_dropped() -> None:
    run = Observed(replace(RULES, audit_share_min=0.25, newcomer_bundles=1, escrow_bundles=3))
    run.join("anna", "ben")
    run.publish()
    run.accept(run.upload(run.granted("anna", 0, 4), audited=False))
    run.refuse(run.upload(run.granted("anna", 0, 2)), RejectReason.SEED_MISMATCH)
    while not run.fix():
        run.accept(run.upload(run.granted("ben", 0)))
    run.publish()
    [step] = run.steps
    assert (step.dropped, step.refused) == ({"taken_back": 2}, {"seed_mismatch": 1})
    assert step.lags == {0: 6}
    assert len(step.queue_seconds) == 6, "whoever filled them afterwards is measured as ever"


def test_a_ban_ends_what_waited_and_costs_by_what_it_ends() -> None:
    """The tracker does not search leases: it works with a state whose other leases cannot be listed."""

    class Unlisted(dict[str, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all leases were looked at")

    run = Observed()
    run.join("anna", "ben")
    run.publish()
    run.granted("ben", 0, 2)
    run.granted("anna", 0, 2)
    run.upload(run.granted("anna", 0, 2))
    run.tracker.held = Unlisted(run.tracker.held)
    run.do(ev.WorkerBanned("anna", "by hand"))
    assert [span.outcome for span in run.of(SpanKind.LEASE)] == ["redeemed", "lapsed"]
    assert (run.tracker.judged, len(run.tracker.held)) == ({}, 1)
