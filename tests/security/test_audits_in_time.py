"""No bundle is too large to audit: garbage of the maximum length does not escape its audit by the time that this takes."""

from __future__ import annotations

import dataclasses

import pytest
from tests.node.coordinator_world import ANNA, STOP_TOKEN, VALIDATOR, make_run, memory_parts
from tests.node.scheduler_world import RULES, Run
from tests.time_world import VirtualClock

from prime_lab.cheating import Strategy, at_rate, once_trusted, play
from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.assembly import open_coordinator
from prime_node.coordinator.check_queue import HELD_S_MAX, SILENT_S, TOKENS_S_MAX, CheckQueue
from prime_node.coordinator.state import audits
from prime_node.coordinator.state import events as ev
from prime_protocol.assignment import Sampling
from prime_protocol.check_policy import AuditPolicy, CheckPolicy
from prime_protocol.replies import CheckTask, NotYet
from prime_protocol.requests import CheckRequest, HoldingRequest, LeaseRequest
from prime_protocol.verdict import RejectReason

LEASE_TOKENS = 64_000
CHECK_S = 1.0


@pytest.mark.parametrize("tokens_per_s", [200.0, 1_000.0, 10_000.0])
def test_a_validator_of_any_speed_finishes_the_largest_bundle_before_it_is_given_up(tokens_per_s: float) -> None:
    """Before, every bundle had the same time, and garbage of 64,000 tokens was given up."""
    queue, now_s = CheckQueue(check_s=CHECK_S, attempts_max=3), 0.0
    for number in range(30):  # honest bundles, far shorter than the lease allows
        queue.add(str(number), 0)
        assert queue.take((), now_s, validator="v", tokens_max=lambda bundle: LEASE_TOKENS) == str(number)
        now_s += 0.1 + 500 / tokens_per_s
        queue.measure(str(number), 500, now_s)
        queue.settled([str(number)])
    for bundle in ("garbage", "honest", "short"):  # prefetched: judged one after another
        queue.add(bundle, 0)
        assert queue.take((), now_s, validator="v", tokens_max=lambda bundle: LEASE_TOKENS) == bundle
    assert queue.overdue(now_s + 3 * LEASE_TOKENS / tokens_per_s) == []
    assert queue.take((), now_s + 3 * LEASE_TOKENS / tokens_per_s) is None, "none was overdue"


def test_a_validator_that_was_too_slow_gets_more_time_at_each_attempt() -> None:
    queue = CheckQueue(check_s=CHECK_S, attempts_max=3)
    queue.add("garbage", 0)
    now_s, times_s = 0.0, []
    for _ in range(3):
        assert queue.take((), now_s, validator="v", tokens_max=lambda bundle: 10_000) == "garbage"
        times_s.append(queue.due_s("garbage") - now_s)
        now_s = queue.due_s("garbage")
        given_up = queue.overdue(now_s)
    assert times_s == [41.0, 81.0, 161.0]
    assert given_up == ["garbage"]


def test_a_validator_that_restarts_gets_its_bundles_back_at_once() -> None:
    """Before, they waited for their deadline, which may be half an hour away."""
    queue = CheckQueue(check_s=CHECK_S, attempts_max=3)
    for bundle in ("a", "b", "c"):
        queue.add(bundle, 0)
    assert not queue.begin("v", "1" * 32)
    assert [queue.take((), 0.0, validator=name) for name in ("v", "w")] == ["a", "b"]
    assert not queue.begin("v", "1" * 32), "the same process asks again"
    assert queue.begin("v", "2" * 32)
    assert queue.take((), 0.0, validator="v") == "a"
    assert not queue.begin("v", "1" * 32), "another machine with this key takes nothing back"
    assert queue.take((), 0.0, validator="v") == "c"


def in_hand(queue: CheckQueue, bundles: str, *, validator: str = "v", tokens: int = 0, now_s: float = 0.0) -> None:
    """Let a validator that names its bundles take these."""
    for bundle in bundles:
        queue.add(bundle, 0)
        taken = queue.take((), now_s, validator=validator, session="1", names_bundles=True, tokens_max=lambda _: tokens)
        assert taken == bundle


def test_what_a_validator_had_that_ended_goes_to_another_one_within_a_minute() -> None:
    """Before, it waited for its deadline: up to half an hour for a large lease."""
    queue = CheckQueue(check_s=CHECK_S, attempts_max=3)
    in_hand(queue, "abc", tokens=450_000)
    assert queue.due_s("a") == CHECK_S + TOKENS_S_MAX
    queue.named("v", "1", "abc", 40.0)
    assert queue.overdue(40.0 + SILENT_S - 1) == []
    assert queue.take((), 40.0 + SILENT_S - 1, validator="w") is None
    assert queue.overdue(40.0 + SILENT_S) == []
    assert [queue.take((), 90.0, validator="w") for _ in "abc"] == ["a", "b", "c"]


def test_a_bundle_that_stops_validators_costs_those_behind_it_nothing() -> None:
    """Before, honest bundles in the same hands were given up with it, and charged to their workers."""
    queue, given_up = CheckQueue(check_s=CHECK_S, attempts_max=3), []
    in_hand(queue, "gab")
    for number in range(1, 4):
        given_up += queue.overdue(number * SILENT_S)
        for _ in "gab":
            queue.take((), number * SILENT_S, validator="v", session=str(number), names_bundles=True)
    assert given_up == ["g"]
    queue.settled("g")
    assert queue.overdue(4 * SILENT_S) == []
    assert [queue.take((), 4 * SILENT_S, validator="v") for _ in "ab"] == ["a", "b"]


def test_a_validator_that_names_its_bundles_for_ever_loses_them_all_the_same() -> None:
    queue, now_s = CheckQueue(check_s=CHECK_S, attempts_max=3), 0.0
    in_hand(queue, "abc", tokens=450_000)
    while queue.take((), now_s, validator="w") is None:
        now_s += 5.0
        queue.named("v", "1", "abc", now_s)
        assert queue.overdue(now_s) == []
    assert now_s <= CHECK_S + TOKENS_S_MAX + 5.0


def test_a_validator_that_gives_one_verdict_now_and_then_has_no_bundle_for_hours() -> None:
    queue, now_s = CheckQueue(check_s=CHECK_S, attempts_max=3), 0.0
    in_hand(queue, "abcdefgh", tokens=450_000)
    for judged in "abcd":
        now_s += TOKENS_S_MAX
        queue.named("v", "1", "abcdefgh", now_s)
        queue.settled(judged)
        assert queue.overdue(now_s) == []
        if now_s >= HELD_S_MAX:
            break
    assert queue.take((), now_s, validator="w") == "e"


def test_a_bundle_behind_several_of_the_largest_has_its_own_time() -> None:
    """Before, all bundles of a validator shared 1,800 s, and one behind several of the largest could be given up."""
    queue = CheckQueue(check_s=CHECK_S, attempts_max=1)
    in_hand(queue, "gh", tokens=450_000)
    in_hand(queue, "a", tokens=100)
    for now_s, judged in ((1_700.0, "g"), (3_400.0, "h")):
        queue.named("v", "1", "gha", now_s)
        assert queue.overdue(now_s) == []
        queue.settled(judged)
        assert queue.overdue(now_s) == []
    assert queue.due_s("a") == pytest.approx(3_400.0 + CHECK_S + 0.4)


def test_a_bundle_that_a_living_validator_has_dropped_goes_to_another_one() -> None:
    queue = CheckQueue(check_s=CHECK_S, attempts_max=3)
    in_hand(queue, "ab", tokens=450_000)
    queue.named("v", "1", "a", 40.0)
    assert queue.overdue(SILENT_S) == []
    assert queue.take((), SILENT_S, validator="w") == "b"
    assert queue.take((), SILENT_S, validator="w") is None


async def test_a_validator_is_told_which_of_its_bundles_another_one_has() -> None:
    checks, session = (make_run(), "1" * 32)
    clock = VirtualClock()
    coordinator = await open_coordinator(dataclasses.replace(memory_parts(checks, check_seconds=CHECK_S), clock=clock))
    tasks, anna = coordinator.handlers.check_tasks, ANNA.key_id
    decisions = coordinator.decisions
    decisions.decide(ev.WorkerJoined(anna, anna, "1", "e", 64))
    decisions.decide(ev.ManifestPublished(0, "d" * 64, (UpdateRoute(None, 1),)))
    asked = LeaseRequest(policy_version=0, policy_digest="d" * 64, rollouts_max=2)
    assert not isinstance(await coordinator.handlers.leasing.lease(anna, asked), NotYet)
    (lease,) = decisions.state.leases.values()
    decisions.decide(ev.BundleArrived("b" * 64, lease.lease_id, anna, 2, 1_000))
    request = CheckRequest(policy_versions=(), session=session, names_bundles=True)
    assert isinstance(await tasks.next_check_task(VALIDATOR.key_id, request), CheckTask)
    holding = HoldingRequest(session=session, bundles=("b" * 64, "c" * 64))
    assert (await tasks.take_holding(VALIDATOR.key_id, holding)).lost == ("c" * 64,)
    assert (await tasks.take_holding("another", holding)).lost == ("b" * 64, "c" * 64)
    await clock.sleep(SILENT_S)
    tasks.expire_checks()
    assert (await tasks.take_holding(VALIDATOR.key_id, holding)).lost == ("c" * 64,), "a late verdict still counts"
    assert isinstance(await tasks.next_check_task("another", request), CheckTask)
    assert (await tasks.take_holding(VALIDATOR.key_id, holding)).lost == holding.bundles


async def test_an_audited_bundle_that_no_validator_judges_in_time_has_its_worker_audited_in_full() -> None:
    sampling = Sampling(completion_tokens_max=2_000, stop_token_ids=(STOP_TOKEN,))
    run = make_run(sampling=sampling, checks=CheckPolicy(audits=AuditPolicy()))
    clock = VirtualClock()
    parts = dataclasses.replace(memory_parts(run, check_seconds=CHECK_S, check_attempts_max=2), clock=clock)
    coordinator = await open_coordinator(parts)
    decisions, judging = coordinator.decisions, coordinator.handlers.check_tasks
    anna = ANNA.key_id
    decisions.decide(ev.WorkerJoined(anna, anna, "1", "e", 64))
    decisions.decide(ev.ManifestPublished(0, "d" * 64, (UpdateRoute(None, 1),)))
    asked = LeaseRequest(policy_version=0, policy_digest="d" * 64, rollouts_max=2)
    assert not isinstance(await coordinator.handlers.leasing.lease(anna, asked), NotYet)
    (lease,) = decisions.state.leases.values()
    worker = decisions.state.workers[anna]
    worker.audit_score = 64
    decisions.decide(ev.BundleArrived("b" * 64, lease.lease_id, anna, 2, 1_000, audited=True))
    lefts_s = []
    for _ in range(2):
        task = await judging.next_check_task(VALIDATOR.key_id, CheckRequest(policy_versions=(), asks_left=True))
        assert isinstance(task, CheckTask)
        assert task.left_ms is not None
        lefts_s.append(task.left_ms / 1_000)
        await clock.sleep(lefts_s[-1])
        judging.expire_checks()
    assert lefts_s[0] > CHECK_S + 4 * 2 * 2_000 / 1_000
    assert worker.refused == {RejectReason.UNVERIFIABLE: 2}
    assert (worker.audit_score, worker.strikes) == (60, 0)
    assert audits.audit_share(decisions.state.rules, worker) == 1.0


def test_one_audit_that_is_passed_ends_the_audits_in_full() -> None:
    run = Run(
        dataclasses.replace(RULES, audit_share_min=0.25, newcomer_bundles=2, escrow_bundles=3, max_steps=20),
        workers=("anna",),
    )
    worker = run.state.workers["anna"]
    worker.audit_score = 20
    unaudited = run.upload(run.granted("anna", 0, rollouts_max=2), audited=False)
    unjudged = run.upload(run.granted("anna", 0, rollouts_max=2))
    run.do(ev.VerdictGiven(unjudged, RejectReason.UNVERIFIABLE, "", (), 0, "", unjudged=True))
    run.accept(unaudited)
    assert (worker.audit_score, audits.audit_share(run.state.rules, worker)) == (16, 1.0)
    run.accept(run.upload(run.granted("anna", 0, rollouts_max=2)))
    assert (worker.audit_score, audits.audit_share(run.state.rules, worker)) == (17, 0.25)
    not_audited = run.upload(run.granted("anna", 0, rollouts_max=2), audited=False)
    run.do(ev.VerdictGiven(not_audited, RejectReason.UNVERIFIABLE, "", (), 0, "", unjudged=True))
    assert worker.audit_score == 17, "it needed no forward pass"


@pytest.mark.parametrize("strategy", [at_rate(0.1), at_rate(1.0), once_trusted(17), once_trusted(64)])
@pytest.mark.parametrize("cost", [0.5, 0.9])
def test_garbage_does_not_pay_even_if_half_of_its_audits_are_never_finished(strategy: Strategy, cost: float) -> None:
    checks = CheckPolicy(audits=AuditPolicy())
    outcome = play(strategy, checks, cost=cost, unjudged=0.5, num_lives=40, seed=1)
    assert outcome.gain + 3 * outcome.gain_error < 0
