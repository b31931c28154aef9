"""A problem whose environment fails for every worker is replaced, and one worker alone cannot cause that."""

from __future__ import annotations

import json
from itertools import cycle

import pytest
from tests.node.coordinator_world import ANNA, make_parcel, make_run, memory_parts, running
from tests.node.scheduler_world import Run

from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator import curation
from prime_node.coordinator.assembly import open_coordinator
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants, snapshot
from prime_node.coordinator.state.batches import choose_batch, next_step
from prime_node.coordinator.state.blockers import waits_for
from prime_node.coordinator.state.records import State
from prime_node.coordinator.state.tick import tick
from prime_protocol import limits
from prime_protocol.identity import SigningKey
from prime_protocol.replies import NotYet
from prime_protocol.requests import LeaseRequest, ReturnLeaseRequest
from prime_protocol.verdict import RejectReason


@pytest.fixture
def run() -> Run:
    run = Run()
    run.publish()
    return run


def fail(run: Run, worker: str) -> tuple[int, ...]:
    """Hand a lease of a group back because its environment failed."""
    lease = run.granted(worker, 0, rollouts_max=2)
    run.do(ev.LeaseReturned(lease.lease_id))
    run.do(ev.EpisodesFailed(worker, lease.slots))
    invariants.check_invariants(run.state)
    return lease.slots


async def test_a_run_in_order_ends_though_one_problem_always_fails() -> None:
    coordinator = await open_coordinator(memory_parts(make_run(groups_per_step=4, max_steps=2)))
    workers = [SigningKey(bytes([number]) * 32).key_id for number in (7, 8, 9)]
    for worker in workers:
        coordinator.decisions.decide(ev.WorkerJoined(worker, worker, "1", "e", 64))
    coordinator.decisions.decide(ev.ManifestPublished(0, "d" * 64, (UpdateRoute(None, 1),)))
    broken, _ = coordinator.assigner.problem(0)
    failures: list[str] = []
    for turn, worker in zip(range(100), cycle(workers), strict=False):
        state = coordinator.decisions.state
        if state.head == 2:
            break
        asked = LeaseRequest(policy_version=state.head, policy_digest="d" * 64, rollouts_max=64)
        if not isinstance(await coordinator.handlers.leasing.lease(worker, asked), NotYet):
            lease = list(state.leases.values())[-1]
            if any(coordinator.assigner.problem(slot)[0] == broken for slot in lease.slots):
                await coordinator.handlers.leasing.return_lease(
                    worker, ReturnLeaseRequest(lease_id=lease.lease_id, failed=True)
                )
                failures += [line for line in waits_for(state) if "fail" in line]
                continue
            bundle, count = f"{turn:064x}", len(lease.slots) * state.rules.rollouts_per_group
            coordinator.decisions.decide(ev.BundleArrived(bundle, lease.lease_id, worker, count, 1))
            coordinator.decisions.decide(ev.VerdictGiven(bundle, None, "", (1.0,) * count, 9, "v"))
        if (chosen := choose_batch(state)) is not None:
            coordinator.decisions.decide(ev.BatchFixed(next_step(state), chosen))
            coordinator.decisions.decide(ev.ManifestPublished(state.head + 1, "d" * 64, (UpdateRoute(None, 1),)))
    assert coordinator.decisions.state.head == 2
    assert coordinator.decisions.state.curriculum.draws == {0: 1}
    assert coordinator.report.status_of_run()["problems"] == {"failing": 0, "redrawn": 1}
    assert failures == [
        "2 problems that fail, the first at slot 0: 1 of 3 needed reports",
        "2 problems that fail, the first at slot 0: 2 of 3 needed reports",
        "1 problems that fail, the first at slot 1: 1 of 3 needed reports",
    ]


async def test_a_problem_that_fails_on_workers_machines_alone_is_exchanged_too() -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        lease = await world.lease(ANNA, rollouts_max=1)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        await world.judge(reason=RejectReason.INCOMPLETE)
        assert (await world.lease(ANNA, rollouts_max=1)).groups[0].problem != lease.groups[0].problem


async def test_a_group_that_no_validator_can_score_is_another_problem_the_next_time() -> None:
    async with running(memory_parts(make_run()), ANNA) as world:
        lease = await world.lease(ANNA, rollouts_max=1)
        await world.client(ANNA).upload(make_parcel(lease, ANNA))
        await world.judge(reason=RejectReason.UNVERIFIABLE, unscored=(0, 1))
        again = await world.lease(ANNA, rollouts_max=1)
        assert [group.slot for group in again.groups] == [group.slot for group in lease.groups]
        assert again.groups[0].problem != lease.groups[0].problem
        await world.client(ANNA).return_lease(ReturnLeaseRequest(lease_id=again.lease_id))
        kept = await world.lease(ANNA, rollouts_max=1)
        assert kept.groups == again.groups, "handed back for another reason, it stays what it is"
        await world.client(ANNA).upload(make_parcel(kept, ANNA))
        await world.judge()


def test_one_network_cannot_have_a_problem_exchanged(run: Run) -> None:
    run.join("anna", "ben")
    for number in range(10):
        run.join(f"sybil {number}", network="evil")
        assert fail(run, f"sybil {number}") == (0,)
    assert run.state.failing == {0: ("evil",)}
    assert not run.state.curriculum.redraw
    fail(run, "anna")
    assert not run.state.curriculum.redraw
    fail(run, "ben")
    assert run.state.curriculum.redraw == {0}
    assert run.state.num_redrawn == 1


def test_a_single_strangers_report_needs_a_validators(run: Run) -> None:
    run.join("eve", network="evil")
    fail(run, "eve")
    assert run.state.failing == {0: ("evil",)}
    run.do(ev.EpisodesFailed("eve", (0,), is_judged=True))
    assert run.state.curriculum.redraw == {0}


def test_a_stranger_whose_answer_breaks_the_validators_environment_outvotes_no_worker(run: Run) -> None:
    run.join("anna")
    run.join("eve", network="evil")
    run.refuse(run.upload(run.granted("eve", 0, rollouts_max=2)), RejectReason.UNVERIFIABLE)
    run.do(ev.EpisodesFailed("eve", (0,), is_judged=True))
    assert not run.state.curriculum.redraw
    fail(run, "anna")
    assert run.state.curriculum.redraw == {0}


def test_the_report_of_a_stranger_that_leaves_still_counts(run: Run) -> None:
    run.join("anna")
    run.join("eve", network="evil")
    run.join("mallory", network="wicked")
    fail(run, "eve")
    fail(run, "mallory")
    run.do(ev.WorkerLeft("mallory"))
    run.do(ev.EpisodesFailed("eve", (0,)))
    assert not run.state.curriculum.redraw
    fail(run, "anna")
    assert run.state.curriculum.redraw == {0}


def test_an_accepted_group_ends_the_count(run: Run) -> None:
    run.join("anna", "ben", "carl")
    fail(run, "anna")
    fail(run, "ben")
    run.accept(run.upload(run.granted("carl", 0, rollouts_max=2)))
    assert run.state.failing == {}


def test_a_filled_slot_accepts_no_more_reports(run: Run) -> None:
    run.join("anna", "ben")
    slow = run.granted("anna", 0, rollouts_max=2)
    run.accept(run.upload(slow))
    for worker in ("anna", "ben"):
        run.do(ev.EpisodesFailed(worker, slow.slots))
    assert (run.state.failing, run.state.curriculum.redraw) == ({}, set())


def test_what_failed_is_leased_alone(run: Run) -> None:
    run.join("anna", "ben")
    lease = run.granted("anna", 0, rollouts_max=4)
    run.do(ev.LeaseReturned(lease.lease_id))
    run.do(ev.EpisodesFailed("anna", lease.slots))
    assert lease.slots == (0, 1)
    assert run.granted("anna", 0).slots == (0,)


def test_an_older_log_exchanges_nothing(run: Run) -> None:
    run.join("anna", "ben", "carl")
    for worker in ("anna", "ben", "carl"):
        run.refuse(run.upload(run.granted(worker, 0, rollouts_max=2)), RejectReason.INCOMPLETE)
    assert (run.state.failing, run.state.curriculum.redraw) == ({}, set())


def test_reports_survive_a_restart_and_older_snapshots_have_none(run: Run) -> None:
    run.join("anna", "ben", "carl")
    fail(run, "anna")
    again = State(run.state.rules)
    for event, at_ms in run.log:
        tick(again, ev.event_from_json(ev.event_to_json(event)), at_ms)
    assert again == run.state == snapshot.state_from_json(snapshot.state_to_json(run.state))
    older = json.loads(snapshot.state_to_json(run.state))
    del older["failing"], older["num_redrawn"]
    assert snapshot.state_from_json(json.dumps(older)).failing == {}


async def test_a_lease_keeps_the_problem_it_drew_when_the_curriculum_has_forgotten_the_draw() -> None:
    coordinator = await open_coordinator(memory_parts(make_run(groups_per_step=4, max_steps=2)))
    worker = SigningKey(bytes([7]) * 32).key_id
    coordinator.decisions.decide(ev.WorkerJoined(worker, worker, "1", "e", 64))
    coordinator.decisions.decide(ev.ManifestPublished(0, "d" * 64, (UpdateRoute(None, 1),)))
    first, _ = coordinator.assigner.problem(0)
    coordinator.decisions.state.curriculum.redraw.add(0)
    await coordinator.handlers.leasing.lease(
        worker, LeaseRequest(policy_version=0, policy_digest="d" * 64, rollouts_max=64)
    )
    (record,) = coordinator.decisions.state.leases.values()
    leased = coordinator.assigner.lease(record)
    assert leased.groups[0].problem != first
    # Others filled its slots, which are trained and durable.
    coordinator.decisions.state.curriculum.forget_before(1, groups_per_step=4)
    assert coordinator.assigner.lease(record) == leased


async def test_another_problem_is_drawn_though_prompts_before_the_failing_one_were_too_long() -> None:
    coordinator = await open_coordinator(
        memory_parts(make_run(groups_per_step=16, limits=limits.Limits(prompt_tokens_max=21)))
    )
    coordinator.decisions.decide(ev.ManifestPublished(0, "d" * 64, (UpdateRoute(None, 1),)))
    slot = next(slot for slot in range(16) if coordinator.assigner.asked_draw(slot, 0) > 0)
    broken, _ = coordinator.assigner.problem(slot)
    coordinator.decisions.state.curriculum.redraw.add(slot)
    (draw,) = coordinator.curation.draws_of((slot,))
    assert coordinator.assigner.problem(slot, draw)[0] != broken


async def test_no_slot_draws_beyond_what_an_auditor_tries() -> None:
    coordinator = await open_coordinator(memory_parts(make_run(groups_per_step=16)))
    coordinator.decisions.decide(ev.ManifestPublished(0, "d" * 64, (UpdateRoute(None, 1),)))
    for drawn in (0, 1_000, limits.LEASE_DRAWS_MAX):
        coordinator.decisions.state.curriculum.draws[0] = drawn
        coordinator.decisions.state.curriculum.redraw.add(0)
        (draw,) = coordinator.curation.draws_of((0,))
        assert draw == min(drawn + 1, curation.DRAW_MAX)
        assert coordinator.assigner.asked_draw(0, draw) < limits.LEASE_DRAWS_MAX
