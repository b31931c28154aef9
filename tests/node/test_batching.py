"""Selection of groups for the next batch when they are not taken in order."""

from __future__ import annotations

from dataclasses import replace

from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.batches import choose_batch
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
    run = Run(rules)
    run.join("ben")
    run.publish()
    fill(run, 0, 2, 3)
    assert choose_batch(run.state) is None, "the window is slots 0 and 1"
    fill(run, 0, 0, 1)
    assert choose_batch(run.state) == (0, 1)
    assert not run.fix()
    assert choose_batch(run.state) == (2, 3)


def test_a_group_that_would_soon_be_too_old_is_waited_for_by_the_oldest_policy_that_anybody_samples_it_with() -> None:
    rules = replace(RULES, groups_per_step=2, async_level=1, lag_max=1, selection=Selection.READY_FIRST)
    run = Run(replace(rules, stale=StalePolicy.WAIT, leases_per_slot_max=2))
    run.join("anna", "ben", "carl")
    run.publish()
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
    run.do(ev.LeaseReturned(slow))
    assert choose_batch(run.state) == (3, 4)
