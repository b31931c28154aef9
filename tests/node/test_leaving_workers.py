"""Leases that a worker hands back when it is stopped: it gets them again, and no others, when it comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from tests.node.coordinator_world import ANNA, memory_parts, running
from tests.node.scheduler_world import RULES, Run
from tests.node.seed_chain_world import chained

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants, snapshot
from prime_node.coordinator.state.records import LeaseRecord, WorkerRecord
from prime_node.coordinator.state.scheduler import NothingToLease
from prime_protocol.requests import LeaveRequest, ReturnLeaseRequest


@pytest.fixture
def run() -> Run:
    return Run(workers=("anna", "ben"))


def anna(run: Run) -> WorkerRecord:
    return run.state.workers["anna"]


def stop(run: Run, *returned: LeaseRecord) -> None:
    """Stop Anna's worker as Ctrl-C does, and start it again."""
    for lease in returned:
        run.do(ev.LeaseReturned(lease.lease_id))
    run.do(ev.WorkerLeft("anna"))
    run.join("anna")


@pytest.mark.parametrize("num_returned", [0, 1, 3])
def test_a_worker_that_was_stopped_gets_its_leases_again_and_they_do_not_count(run: Run, num_returned: int) -> None:
    before = [run.granted("anna", 0) for _ in range(3)]
    stop(run, *before[:num_returned])
    assert (anna(run).wasted, anna(run).pause_until_ms > run.now_ms) == (3, True)
    after = [run.granted("anna", 0) for _ in range(3)]
    assert [(lease.step, lease.slots) for lease in after] == [(lease.step, lease.slots) for lease in before]
    assert {lease.lease_id for lease in after}.isdisjoint(lease.lease_id for lease in before)
    assert (anna(run).wasted, anna(run).pause_until_ms, anna(run).left) == (0, 0, ())
    assert anna(run).abandoned == 3, "the audits keep what was abandoned"
    invariants.check_invariants(run.state)
    assert snapshot.state_from_json(snapshot.state_to_json(run.state)) == run.state


def test_a_worker_that_leaves_again_and_again_waits_ever_longer_for_one_group_at_a_time(run: Run) -> None:
    pauses_s, sizes = [], []
    for _ in range(8):
        sizes.append(len(run.granted("anna", 0).slots))
        stop(run)
        pauses_s.append(max(0, anna(run).pause_until_ms - run.now_ms) // 1_000)
        run.now_ms += 1_000 * pauses_s[-1]
    assert pauses_s == [0, 0, 1, 2, 4, 8, 16, 32], "the first one does not count"
    assert sizes == [3, 3, 3, 1, 1, 1, 1, 1]
    run.accept(run.upload(run.granted("anna", 0)))
    held = run.granted("anna", 0)
    stop(run)
    assert run.granted("anna", 0).slots == held.slots
    assert anna(run).wasted == 0, "an accepted bundle makes it like any other"


def test_a_worker_that_already_pauses_avoids_nothing_by_leaving(run: Run) -> None:
    for _ in range(5):
        run.do(ev.LeaseReturned(run.granted("anna", 0).lease_id))
        run.now_ms = max(run.now_ms, anna(run).pause_until_ms)
    run.now_ms -= 1
    stop(run)
    assert anna(run).left == ()
    assert isinstance(run.lease("anna", 0), NothingToLease)


def take_slots(run: Run) -> None:
    run.granted("ben", 0)


def fail_problem(run: Run) -> None:
    run.do(ev.EpisodesFailed("ben", (0,)))


@pytest.mark.parametrize(("change", "wasted"), [(take_slots, 2), (Run.publish, 2), (fail_problem, 1)])
def test_leases_that_are_not_the_same_any_more_count_as_abandoned(
    run: Run, change: Callable[[Run], None], wasted: int
) -> None:
    """Other slots or another policy have other seeds, and a failing problem may be exchanged."""
    for _ in range(2):
        run.granted("anna", 0, rollouts_max=2)
    stop(run)
    change(run)
    found = run.lease("anna", run.state.head)
    assert isinstance(found, NothingToLease) == (wasted == 2)
    assert anna(run).wasted == wasted


def test_a_lease_with_another_problem_still_counts(run: Run) -> None:
    lease = run.granted("anna", 0)
    stop(run)
    again = ev.LeaseGranted(
        "other", "anna", 0, 0, lease.policy_digest, lease.slots, run.now_ms + 1_000, draws=(1, 0, 0)
    )
    run.do(again)
    assert (anna(run).wasted, anna(run).left) == (1, ())


def test_another_lease_ends_the_offer(run: Run) -> None:
    lease = run.granted("anna", 0)
    stop(run)
    taken = run.granted("ben", 0)
    assert taken.slots == lease.slots
    assert run.granted("anna", 0).slots != lease.slots
    run.do(ev.LeaseReturned(taken.lease_id))
    run.granted("anna", 0)
    assert (anna(run).wasted, anna(run).resumed) == (1, False)


@pytest.mark.parametrize("end", [lambda run: run.do(ev.WorkersLost(("anna",))), lambda run: run.join("anna")])
def test_a_worker_that_crashed_keeps_its_charge(run: Run, end: Callable[[Run], object]) -> None:
    lease = run.granted("anna", 0)
    end(run)
    run.join("anna")
    assert run.granted("anna", 0).slots == lease.slots
    assert anna(run).wasted == 1


def test_a_lease_larger_than_what_the_worker_asks_for_or_its_share_is_not_offered_again() -> None:
    run = Run(dataclasses.replace(RULES, workers_max=16), workers=("anna",))
    lease = run.granted("anna", 0)
    assert len(lease.slots) == 6
    stop(run)
    run.join("ben")
    assert len(run.granted("anna", 0).slots) == 3, "its share has fallen"
    assert anna(run).wasted == 1


async def test_the_lease_that_a_worker_gets_again_has_the_same_problems_and_seeds() -> None:
    async with running(memory_parts(chained()), ANNA) as world:
        before = [await world.lease(ANNA, rollouts_max=4) for _ in range(2)]
        await world.client(ANNA).return_lease(ReturnLeaseRequest(lease_id=before[0].lease_id))
        await world.client(ANNA).leave(LeaveRequest())
        await world.join(ANNA)
        after = [await world.lease(ANNA, rollouts_max=4) for _ in range(2)]
    assert [lease.groups for lease in after] == [lease.groups for lease in before]
