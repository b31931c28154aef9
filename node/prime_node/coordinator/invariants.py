"""What is true of the state after every event. Checked by the tests after each one, and by the daemon once when it starts."""

from __future__ import annotations

from collections import Counter

from prime_node.broadcast.paths import search
from prime_node.coordinator.records import LeaseEnd, LeaseRecord, State
from prime_node.coordinator.scheduler import waits_for
from prime_protocol import step


def check(state: State) -> None:
    """Raises AssertionError with the invariant that does not hold."""
    _check_slots(state)
    _check_leases(state)
    _check_workers(state)
    check_ways(state)
    _check_progress(state)


def _check_slots(state: State) -> None:
    """No slot is lost and none is in two places."""
    size = state.rules.groups_per_step
    assert list(state.steps) == list(range(state.first_step, state.first_step + len(state.steps))), "steps leave a gap"
    assert not state.steps or max(state.steps) == state.last_step, "the window does not end where leasing does"
    held: dict[int, list[int]] = {number: [] for number in state.steps}
    for lease in state.leases.values():
        held[lease.step] += lease.slots
    for pending in state.bundles.values():
        held[pending.lease.step] += pending.lease.slots
    for number, current in state.steps.items():
        assert current.open == sorted(current.open), f"step {number}: open slots out of order"
        places = Counter([*current.open, *held[number], *current.accepted])
        assert places == Counter(range(number * size, (number + 1) * size)), f"step {number}: slots lost or doubled"
        assert not current.fixed or state.is_ready(number), f"step {number}: fixed before it was full"
        for group in current.accepted.values():
            _check_admitted(state, number, group.policy_version)
            assert len(group.rewards) == state.rules.rollouts_per_group, f"step {number}: a reward is missing"


def _check_leases(state: State) -> None:
    for lease_id, lease in state.leases.items():
        assert lease.lease_id == lease_id
        assert lease.end is None
        assert lease.bundle is None
        assert lease_id in state.workers[lease.worker].leases, "a lease without a worker"
        assert lease.expires_at_ms > lease.issued_at_ms, "a lease without a deadline"
        _check_lease(state, lease)
    for bundle, pending in state.bundles.items():
        assert pending.bundle == pending.lease.bundle == bundle
        assert pending.lease.end is LeaseEnd.REDEEMED
        assert state.workers[pending.lease.worker].pending[pending.lease.lease_id] == bundle
        _check_lease(state, pending.lease)


def _check_lease(state: State, lease: LeaseRecord) -> None:
    assert lease.slots
    assert all(slot // state.rules.groups_per_step == lease.step for slot in lease.slots)
    _check_admitted(state, lease.step, lease.policy_version)


def _check_admitted(state: State, number: int, policy_version: int) -> None:
    assert step.admits(number, policy_version, state.rules.async_level), f"policy {policy_version} at step {number}"
    assert policy_version <= state.head, "a policy from the future"
    assert number < state.rules.max_steps, "a step after the run's end"


def _check_workers(state: State) -> None:
    assert state.num_active == sum(worker.active for worker in state.workers.values())
    assert sum(len(worker.leases) for worker in state.workers.values()) == len(state.leases)
    assert sum(len(worker.pending) for worker in state.workers.values()) == len(state.bundles)
    for worker in state.workers.values():
        assert worker.active or not worker.leases, "somebody who is away holds a lease"
        assert not worker.banned or not (worker.active or worker.pending), "a banned worker takes part"
        assert len(worker.leases) <= state.rules.leases_per_worker_max
        assert all(lease.end is not None for lease in worker.ended.values())


def check_ways(state: State) -> None:
    """A newcomer always finds a way to the head, and to every policy that a lease may name."""
    routes = {version: publication.routes for version, publication in state.published.items()}
    for version in range(max(0, state.head - state.rules.async_level), state.head + 1):
        assert search(version, routes).path is not None, f"no way leads to policy {version}"


def _check_progress(state: State) -> None:
    """Unless the run is over, somebody can be named who has to act next."""
    assert waits_for(state) or state.head >= state.rules.max_steps, "everything waits for nobody"
