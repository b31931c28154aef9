"""Selection of groups for the next batch when they are not taken in order, and the bounds on those in progress."""

from __future__ import annotations

from dataclasses import replace

from tests.node.scheduler_world import RULES, Run

from prime_node.broadcast.routes import UpdateRoute
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import choose_batch, stale_slots
from prime_node.coordinator.state.effects import BATCH_CHANGED
from prime_node.coordinator.state.records import LeaseRecord
from prime_node.coordinator.state.scheduler import NothingToLease, is_work_left
from prime_protocol.schedule import Selection, StalePolicy


def lease(run: Run, worker: str, policy_version: int, *slots: int) -> str:
    """Lease these slots, regardless of the scheduler's choice."""
    lease_id = f"lease {run.state.num_leases}"
    step, digest = slots[0] // run.state.rules.groups_per_step, run.state.published[policy_version].digest
    run.do(ev.LeaseGranted(lease_id, worker, step, policy_version, digest, slots, run.now_ms + 1_000))
    return lease_id


def fill(run: Run, policy_version: int, *slots: int) -> None:
    run.accept(run.upload(run.state.leases[lease(run, "ben", policy_version, *slots)]))


def test_the_window_is_of_slots_that_are_not_trained_so_it_never_holds_less_than_a_batch() -> None:
    rules = replace(RULES, groups_per_step=4, batches_per_step=2, selection=Selection.WINDOW, window_groups=2)
    run = Run(rules, workers=("ben",))
    fill(run, 0, 2, 3)
    assert choose_batch(run.state) is None, "the window is slots 0 and 1"
    fill(run, 0, 0, 1)
    assert choose_batch(run.state) == (0, 1)
    assert not run.fix()
    assert choose_batch(run.state) == (2, 3)


def test_a_group_that_would_soon_be_too_old_is_waited_for_by_the_oldest_policy_that_anybody_samples_it_with() -> None:
    rules = replace(RULES, groups_per_step=2, async_level=1, lag_max=1, selection=Selection.READY_FIRST)
    run = Run(replace(rules, stale=StalePolicy.WAIT, leases_per_slot_max=2), workers=("anna", "ben", "carl"))
    slow = lease(run, "anna", 0, 0)
    fill(run, 0, 1)
    fill(run, 0, 2)
    assert choose_batch(run.state) == (1, 2)
    assert run.fix()
    run.publish()
    lease(run, "carl", 1, 0)
    fill(run, 1, 3)
    fill(run, 1, 4)
    assert choose_batch(run.state) is None, "slot 0 on policy 0 can be trained by step 1 and by none after it"
    assert BATCH_CHANGED in run.do(ev.LeaseReturned(slow)), "the trainer asks again"
    assert choose_batch(run.state) == (3, 4)


def test_wait_drops_nothing_and_trains_what_became_too_old_meanwhile() -> None:
    rules = replace(RULES, groups_per_step=1, async_level=1, lag_max=0, selection=Selection.LOWEST_VERSION_FIRST)
    run = Run(replace(rules, stale=StalePolicy.WAIT), workers=("ben",))
    fill(run, 0, 0)
    fill(run, 0, 1)
    assert run.fix()
    run.publish()
    assert stale_slots(run.state, 1) == ()
    assert choose_batch(run.state) == (1,)


def test_the_lowest_slot_is_first_though_it_became_ready_later() -> None:
    run = Run(
        replace(RULES, groups_per_step=1, async_level=9, max_steps=20, selection=Selection.LOWEST_SLOT_FIRST),
        workers=("ben",),
    )
    for slot in (7, 5, 8):
        fill(run, 0, slot)
    assert choose_batch(run.state) == (5,)


def test_freshest_first_takes_the_newest_policy_and_version_fifo_waits_for_the_oldest() -> None:
    rules = replace(RULES, groups_per_step=2, async_level=2, max_steps=9)
    for selection, before, after in [
        (Selection.FRESHEST_FIRST, (3, 4), (3, 4)),
        (Selection.VERSION_FIFO, None, (2, 3)),
        (Selection.LOWEST_VERSION_FIRST, (3, 4), (2, 3)),
    ]:
        run = Run(replace(rules, selection=selection), workers=("ben",))
        fill(run, 0, 0, 1)
        assert run.fix()
        run.publish()
        slow = lease(run, "ben", 0, 2)
        fill(run, 1, 3)
        fill(run, 1, 4)
        assert choose_batch(run.state) == before, selection
        run.accept(run.upload(run.state.leases[slow]))
        assert choose_batch(run.state) == after, selection


def prime_rl_today(*, permits: int) -> Run:
    rules = replace(RULES, groups_per_step=6, slots_ahead=12 + permits, async_level=3, max_steps=20)
    rules = replace(rules, leases_per_worker_max=100, bundles_pending_per_worker_max=100)
    return Run(
        replace(rules, selection=Selection.READY_FIRST, inflight_max=permits, max_run_ahead=1), workers=("anna", "ben")
    )


def test_groups_are_begun_while_a_permit_is_free_and_shipped_batches_are_few() -> None:
    """R = 6, 12 permits, 10 groups in progress, 2 ready: prime-rl begins two more."""
    run = prime_rl_today(permits=12)
    leases = [run.granted("anna", 0, 2) for _ in range(6)] + [run.granted("ben", 0, 2) for _ in range(6)]
    assert isinstance(run.lease("ben", 0), NothingToLease)
    assert not is_work_left(run.state)
    for each in leases[:2]:
        run.accept(run.upload(each))
    assert is_work_left(run.state)
    assert len(run.granted("ben", 0, 20).slots) == 2, "as many as there are permits"


def test_a_batch_is_held_and_nothing_is_begun_while_too_many_steps_are_not_published() -> None:
    run = prime_rl_today(permits=20)
    for worker in ("anna", "ben"):
        while isinstance(given := run.lease(worker, 0, 2), LeaseRecord):
            run.accept(run.upload(given))
    assert run.fix()
    assert run.fix()
    assert run.state.num_ready >= 6, "a third batch is complete"
    assert choose_batch(run.state) is None
    refused = run.lease("anna", 0)
    assert isinstance(refused, NothingToLease)
    assert (refused.reason, refused.is_worth_waiting) == ("the schedule allows no more groups in progress now", True)
    version = run.state.head + 1
    assert BATCH_CHANGED in run.do(ev.ManifestPublished(version, f"{version:064d}", (UpdateRoute(None, 100),)))
    assert choose_batch(run.state) is not None
