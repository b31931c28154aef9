"""Invariants of the state. The tests check them after every event, the daemon once when it starts."""

from __future__ import annotations

from collections import Counter

from prime_node.broadcast.routes import search
from prime_node.coordinator.state.batches import oldest_policy_needed
from prime_node.coordinator.state.blockers import waits_for
from prime_node.coordinator.state.evaluations import ATTEMPTS_MAX
from prime_node.coordinator.state.networks import Network
from prime_node.coordinator.state.newcomers import is_forgettable, is_newcomer
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord, State
from prime_node.coordinator.state.slot_records import AcceptedGroup


def check_invariants(state: State) -> None:
    """Raise AssertionError with the violated invariant."""
    _check_slots(state)
    _check_evaluations(state)
    _check_leases(state)
    _check_workers(state)
    check_update_paths(state)
    _check_progress(state)


def _check_slots(state: State) -> None:
    """Check that no slot is lost, and that each is open, held or accepted."""
    size = state.rules.groups_per_step
    window = range(state.first_step, state.last_step + 1)
    assert list(state.steps) == sorted(state.steps), "steps out of order"
    assert all(number in window for number in state.steps), "a step outside the window"
    held: dict[int, list[str]] = {}
    for lease in [*state.leases.values(), *(pending.lease for pending in state.bundles.values())]:
        for slot in lease.slots if lease.step in state.steps and not state.is_evaluation(lease.slots) else ():
            held.setdefault(slot, []).append(lease.lease_id)
    for number, current in state.steps.items():
        assert current.open == sorted(current.open, reverse=True), f"step {number}: open slots out of order"
        assert current.taken.keys() <= current.accepted.keys(), (
            f"step {number}: a trained slot is not among the accepted ones"
        )
        assert current.fixed == (len(current.taken) == size), (
            f"step {number}: fixed before all its groups were in a batch"
        )
        opened = set(current.open)
        assert len(opened) == len(current.open), f"step {number}: a slot is open twice"
        for slot in range(number * size, (number + 1) * size):
            holders = sorted(held.get(slot, ()))
            assert sorted(current.held.get(slot, ())) == holders, (
                f"slot {slot}: its holders are not those of the leases"
            )
            assert len(holders) <= max(2, state.rules.leases_per_slot_max), f"slot {slot}: leased too often at once"
            is_open = not holders and slot not in current.accepted
            assert (slot in opened) == is_open, f"slot {slot} lost or doubled"
        for group in current.accepted.values():
            _check_admitted(state, number * size, group.policy_version)
            assert len(group.rewards) == state.rules.rollouts_per_group, f"step {number}: a reward is missing"
    _check_batches(state)


def _check_evaluations(state: State) -> None:
    """Check that no slot of a current evaluation is lost, and that no completed evaluation is kept."""
    for version, current in state.evaluations.items():
        holders = [*state.leases.values(), *(pending.lease for pending in state.bundles.values())]
        held = [slot for lease in holders if state.step_of(lease) is current for slot in lease.slots]
        assert sorted(held) == sorted(slot for slot, leases in current.held.items() for _ in leases)
        assert not current.taken, f"evaluation of policy {version}: a slot was trained on"
        assert current.open or current.held, f"evaluation of policy {version}: complete and not settled"
        known = {*current.open, *current.held, *current.accepted}
        given_up = sum(slot not in known for slot, number in current.attempts.items() if number >= ATTEMPTS_MAX)
        assert current.retired or len(known) + given_up == current.num_slots, (
            f"evaluation of policy {version}: a slot is lost"
        )
        assert all(slot >= state.rules.slots_end for slot in known)


def _check_batches(state: State) -> None:
    rules = state.rules
    assert all(number >= state.durable_step for number in state.batches), "a batch below the durable step is still kept"
    given = {slot: number for number, batches in state.batches.items() for batch in batches for slot in batch}
    for number, batches in state.batches.items():
        assert len(batches) <= rules.batches_per_step, f"step {number} has too many batches"
        assert all(len(batch) == rules.batch_groups for batch in batches), f"a batch of step {number} is not full"
    assert len(given) == sum(len(batch) for batches in state.batches.values() for batch in batches), "trained twice"
    for current in state.steps.values():
        for slot, number in current.taken.items():
            assert number < state.durable_step or given.get(slot) == number, f"slot {slot}: in another batch"
            _check_trained(state, number, current.accepted[slot])
    assert all(slot // rules.groups_per_step in state.steps for slot in given), "a batch's slots are forgotten"
    num_ready = sum(len(current.accepted) - len(current.taken) for current in state.steps.values())
    assert state.num_ready == num_ready, "ready groups miscounted"


def _check_trained(state: State, number: int, group: AcceptedGroup) -> None:
    fault = state.rules.admission.check_trained(number, group.counted_from(state.rules.staleness_from))
    assert fault is None, f"policy {group.policy_version} is {fault} for step {number}"


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
        assert bundle in state.workers[pending.lease.worker].pending
        _check_lease(state, pending.lease)


def _check_lease(state: State, lease: LeaseRecord) -> None:
    assert lease.slots
    if state.is_evaluation(lease.slots):
        assert lease.step == lease.policy_version, "an evaluation of another policy"
        return
    assert all(slot // state.rules.groups_per_step == lease.step for slot in lease.slots)
    _check_admitted(state, max(lease.slots), lease.policy_version)


def _check_admitted(state: State, slot: int, policy_version: int) -> None:
    assert state.rules.admission.admits_slot(slot, policy_version), f"policy {policy_version} at slot {slot}"
    assert policy_version <= state.head, "a policy from the future"
    assert slot < state.rules.max_steps * state.rules.groups_per_step, "a slot after the run's end"


def _check_workers(state: State) -> None:
    _check_networks(state)
    owned = {key: person for person, machines in state.persons.items() for key in machines}
    assert all(state.persons.values()), "a person without a machine"
    assert owned == {key: worker.person for key, worker in state.workers.items() if worker.person}, (
        "a person's machines"
    )
    assert state.workers.keys().isdisjoint(state.persons), "a person's key is a machine's"
    assert state.num_active == sum(worker.active for worker in state.workers.values())
    assert sum(len(worker.leases) for worker in state.workers.values()) == len(state.leases)
    assert sum(len(worker.pending) for worker in state.workers.values()) == len(state.bundles)
    for worker in state.workers.values():
        assert worker.active or not worker.leases, "an absent worker holds a lease"
        assert not worker.banned or not (worker.active or worker.pending), "a banned worker is active"
        assert len(worker.leases) <= state.rules.leases_per_worker_max
        assert all(lease.end is not None for lease in worker.ended)


def _check_networks(state: State) -> None:
    """Check that the incremental sums per network equal sums over all keys."""
    expected: dict[str, Network] = {}
    bans = Counter(worker.network for worker in state.workers.values() if worker.banned is not None)
    for worker in state.workers.values():
        known = expected.setdefault(worker.network, Network())
        known.keys += 1
        known.active += worker.active
        if worker.active and is_newcomer(state.rules, worker):
            known.newcomers += 1
            known.held += len(worker.leases) + len(worker.pending)
            known.passed += worker.audit_score
        if is_forgettable(worker):
            known.away[worker.worker] = None
    assert state.networks.keys() == expected.keys(), "the set of networks differs from the workers' networks"
    for name, known in state.networks.items():
        other = expected[name]
        other.bans, other.banned_at_ms, other.broken = known.bans, known.banned_at_ms, known.broken
        assert known == other, f"network {name}: sums {known}, but its keys give {other}"
        assert known.bans >= bans[name], f"network {name}: a ban is not counted"
        assert not name or not known.away or name in state.by_away[len(known.away)], (
            f"network {name}: not in the index of its count of absent keys"
        )
    assert sum(map(len, state.by_away.values())) == sum(bool(name and one.away) for name, one in state.networks.items())
    assert state.crowd == sum(known.crowd for known in state.networks.values()), "the crowd's total is wrong"


def check_update_paths(state: State) -> None:
    """Check that a newcomer finds an update path to the head, and to every policy that a lease may name."""
    routes = {version: publication.routes for version, publication in state.published.items()}
    for version in range(oldest_policy_needed(state), state.head + 1):
        assert search(version, routes) is not None, f"no update path leads to policy {version}"


def _check_progress(state: State) -> None:
    """Check that some participant has to act next, unless the run is over."""
    assert waits_for(state) or state.head >= state.rules.max_steps, "the run is not over, and no participant has to act"
