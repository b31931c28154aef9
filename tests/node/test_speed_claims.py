"""A newcomer's claimed speed: the first lease fits it, and a false claim delays little."""

from __future__ import annotations

import dataclasses

import pytest
from tests.node.scheduler_world import RULES, Run

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state import invariants, scheduler
from prime_node.coordinator.state.records import Claim, LeaseRecord
from prime_node.coordinator.state.scheduler import NothingToLease


def slow_first_lease(claim: Claim | None, *, network: str = "") -> tuple[Run, LeaseRecord]:
    """A newcomer holds a group while all others have delivered theirs; a rollout usually takes 10 ms."""
    run = Run(dataclasses.replace(RULES, lease_ms=1_000_000), workers=("honest",))
    first = run.granted("honest", 0, rollouts_max=2)
    run.now_ms += 20
    run.accept(run.upload(first))
    run.join("slow", network=network)
    if claim is not None:
        run.do(ev.SpeedClaimed("slow", claim))
    held = run.granted("slow", 0, rollouts_max=2)
    while isinstance(lease := run.lease("honest", 0), LeaseRecord):
        run.accept(run.upload(lease))
    return run, held


def lost_after_ms(run: Run) -> int:
    """Return the time until another worker is leased the same group."""
    for waited_s in range(1_000):
        if isinstance(lease := run.lease("honest", run.state.head), LeaseRecord):
            run.accept(run.upload(lease))
            return waited_s * 1_000
        run.now_ms += 1_000
    raise AssertionError("the group is never leased")


def test_a_newcomer_far_slower_than_the_others_keeps_its_first_lease_if_it_claimed_it() -> None:
    run, held = slow_first_lease(Claim(rollout_ms=20_000, tokens_per_s=4, download_bytes_per_s=0))
    run.now_ms += 2 * 20_000
    assert isinstance(run.lease("honest", 0), NothingToLease)
    run.accept(run.upload(held))
    assert run.state.is_ready(0)
    assert run.state.workers["slow"].wasted == 0
    assert lost_after_ms(slow_first_lease(None)[0]) == scheduler.SILENCE_MS_MIN + 1_000, "who says nothing does not"


def test_a_false_speed_delays_a_group_by_a_share_of_one_lease_and_once_per_network() -> None:
    run, _ = slow_first_lease(Claim(2**40, 0, 0), network="theirs")
    assert lost_after_ms(run) == pytest.approx(scheduler.CLAIM_SHARE_MAX * 1_000_000, abs=1_000)
    run.join("liar 2", network="theirs")
    run.do(ev.SpeedClaimed("liar 2", Claim(2**40, 0, 0)))
    run.fix()
    run.publish()
    run.granted("liar 2", 1, rollouts_max=2)
    while isinstance(lease := run.lease("honest", 1), LeaseRecord):
        run.accept(run.upload(lease))
    assert lost_after_ms(run) <= scheduler.SILENCE_MS_MIN + 1_000, "its network has broken its word"
    invariants.check_invariants(run.state)


def test_a_key_that_abandoned_a_lease_is_not_believed_in_any_network() -> None:
    run, held = slow_first_lease(Claim(2**40, 0, 0))
    run.do(ev.LeaseReturned(held.lease_id))
    run.granted("slow", 0, rollouts_max=2)
    assert run.state.workers["slow"].wasted == 1
    assert lost_after_ms(run) <= scheduler.SILENCE_MS_MIN + 1_000


def test_a_claim_gives_a_slow_worker_no_more_than_it_can_finish() -> None:
    run = Run(dataclasses.replace(RULES, slow_factor=2.0), workers=("honest", "slow"))
    run.state.step_ms = 1_000.0
    run.state.rollout_ms = 10.0
    run.do(ev.SpeedClaimed("slow", Claim(rollout_ms=400, tokens_per_s=4, download_bytes_per_s=0)))
    assert run.granted("slow", 0).slots == (0,), "one group of two takes 800 ms of the step's 1,000"
    assert len(run.granted("honest", 0).slots) == 3
