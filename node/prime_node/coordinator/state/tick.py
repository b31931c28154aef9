"""The coordinator's state machine: `tick` folds one event into the state and returns its effects.

Rule 1: everything that decides what is leased, accepted, trained or banned is in `State` and changes only here. The same events
give the same state on every machine: `tick` reads no clock, draws no random number and does no I/O. Last signs of life and the
assignment of bundles to validators decide nothing that outlives a restart. They are kept elsewhere.

Rule 2: each slot of a step in the window is open, held by leases and pending bundles, or accepted (slots.py). A slot that is
opened again keeps its number, so a step can always become full (invariants.py checks it).

Rule 3: memory is bounded by the window and by the number of workers. The window is the steps with a slot that is not trained
and durable, up to the last that may be leased. The permanent record of a bundle is its receipt, in the store.

The module that decides on an event (scheduler.py, intake.py, ...) has checked that it is possible. This file asserts that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prime_node.coordinator.state import (
    batches,
    endings,
    failing,
    newcomers,
    operator_orders,
    persons,
    refusals,
    slots,
    suspicion,
    verdicts,
)
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import CHECK_CHANGED, Effect, Settled
from prime_node.coordinator.state.persons import MachineRevoked, PersonBanned, PersonUnbanned
from prime_node.coordinator.state.records import Ban, LeaseEnd, LeaseRecord, PendingBundle, State, WorkerRecord
from prime_protocol.verdict import BanKind, BundleStatus


def tick(state: State, event: ev.Event, at_ms: int) -> list[Effect]:
    """Change `state` as `event` says; return the effects, in order."""
    return _HANDLERS[type(event)](state, event, at_ms)


# Workers


def _worker_joined(state: State, event: ev.WorkerJoined, at_ms: int) -> list[Effect]:
    worker = state.workers.get(event.worker) or WorkerRecord(event.worker, "", "", "", 0, at_ms)
    assert worker.banned is None
    effects = endings.lapse_leases(state, worker, at_ms)
    state.workers.pop(event.worker, None)  # and put back at the end: workers are in the order of joining
    worker.name, worker.software, worker.engine = event.name, event.software, event.engine
    worker.rollouts_max, worker.hardware, worker.joined_at_ms = event.rollouts_max, event.hardware, at_ms
    worker.session = event.session
    state.num_active += not worker.active
    worker.active = True
    state.workers[event.worker] = worker
    if event.invite and event.invite != worker.invite:
        state.invites[event.invite] = state.invites.get(event.invite, 0) + 1
        worker.invite = event.invite
    newcomers.enter_network(state, worker, event.network)
    persons.enter_person(state, worker, event.person, event.delegated_until_ms)
    return effects


def _speed_claimed(state: State, event: ev.SpeedClaimed, at_ms: int) -> list[Effect]:
    state.workers[event.worker].claimed = event.claim
    return []


def _worker_left(state: State, event: ev.WorkerLeft, at_ms: int) -> list[Effect]:
    return endings.leave(state, state.workers[event.worker], at_ms)


def _workers_lost(state: State, event: ev.WorkersLost, at_ms: int) -> list[Effect]:
    return [effect for worker in event.workers for effect in endings.deactivate(state, state.workers[worker], at_ms)]


def _worker_banned(state: State, event: ev.WorkerBanned, at_ms: int) -> list[Effect]:
    return refusals.banish(
        state, state.workers[event.worker], Ban(at_ms, state.current_step, event.reason, None, BanKind.OPERATOR)
    )


def _worker_unbanned(state: State, event: ev.WorkerUnbanned, at_ms: int) -> list[Effect]:
    _unban(state, state.workers[event.worker], at_ms)
    return []


def _unban(state: State, worker: WorkerRecord, at_ms: int) -> None:
    if worker.banned is not None and worker.banned.evidence is not None:
        state.evidence.remove(worker.banned.evidence)
    worker.banned, worker.strikes, worker.audit_score = None, 0, 0
    suspicion.forgive(worker, at_ms)
    worker.wasted, worker.pause_until_ms = 0, 0
    newcomers.unbanned(state, worker)


def _person_banned(state: State, event: PersonBanned, at_ms: int) -> list[Effect]:
    ban = Ban(at_ms, state.current_step, event.reason, None, BanKind.OPERATOR)
    state.banned_persons[event.person] = ban
    free = [machine for machine in persons.machines_of(state, event.person) if machine.banned is None]
    return [effect for machine in free for effect in refusals.banish(state, machine, ban)]


def _person_unbanned(state: State, event: PersonUnbanned, at_ms: int) -> list[Effect]:
    state.banned_persons.pop(event.person, None)
    for machine in persons.machines_of(state, event.person):
        if machine.banned is not None and machine.banned.kind is BanKind.OPERATOR:
            _unban(state, machine, at_ms)
    return []


def _machine_revoked(state: State, event: MachineRevoked, at_ms: int) -> list[Effect]:
    worker = state.workers[event.worker]
    worker.revoked_at_ms = at_ms
    return endings.deactivate(state, worker, at_ms)


def _calibration_added(state: State, event: ev.CalibrationAdded, at_ms: int) -> list[Effect]:
    assert event.version == len(state.calibrations) + 1
    state.calibrations.append(event.digest)
    return []


# Leases


def _lease_granted(state: State, event: ev.LeaseGranted, at_ms: int) -> list[Effect]:
    worker = state.workers[event.worker]
    step = (state.evaluations if state.is_evaluation(event.slots) else state.steps)[event.step]
    assert worker.active
    assert worker.banned is None
    lease = LeaseRecord(
        event.lease_id,
        event.worker,
        event.step,
        event.policy_version,
        event.policy_digest,
        event.slots,
        slots.attempt(step, event.slots),
        at_ms,
        event.expires_at_ms,
        draws=event.draws,
        prompts=event.prompts,
    )
    if worker.left:
        endings.resume(worker, lease)
    state.leases[event.lease_id] = lease
    if event.draws:
        state.curriculum.drawn(event.slots, event.draws)
    slots.hold(step, lease)
    worker.leases += (event.lease_id,)
    endings.forget_ended(worker, event.remembered)
    newcomers.recount(state, worker)
    state.num_leases += 1
    return []


def _lease_returned(state: State, event: ev.LeaseReturned, at_ms: int) -> list[Effect]:
    end = LeaseEnd.CANCELLED if event.cancelled else LeaseEnd.RETURNED
    return endings.give_back(state, event.lease_id, end, at_ms)


def _leases_expired(state: State, event: ev.LeasesExpired, at_ms: int) -> list[Effect]:
    return [effect for lease in event.lease_ids for effect in endings.give_back(state, lease, LeaseEnd.LAPSED, at_ms)]


# Bundles


def _bundle_arrived(state: State, event: ev.BundleArrived, at_ms: int) -> list[Effect]:
    worker = state.workers[event.worker]
    lease = state.lease_of(event.lease_id, event.worker)
    assert lease is not None
    assert lease.worker == event.worker
    assert state.is_redeemable(lease)
    step = state.step_of(lease)
    assert step is not None
    worker.pending += (event.bundle,)
    if lease.end is None:
        del state.leases[lease.lease_id]
        worker.leases = endings.without(worker.leases, lease.lease_id)
    else:  # lapsed, but no other worker took over
        worker.ended = tuple([other for other in worker.ended if other is not lease])
        slots.hold(step, lease)
        newcomers.recount(state, worker)
    lease.end, lease.bundle = LeaseEnd.REDEEMED, event.bundle
    step.bundles.append(event.bundle)
    state.bundles[event.bundle] = PendingBundle(
        event.bundle, lease, event.num_rollouts, event.num_bytes, at_ms, event.audited, event.seeded, event.engine_class
    )
    batches.measure_speed(state, worker, lease, event.num_rollouts, at_ms)
    settled = Settled(event.bundle, lease, event.num_rollouts, 0, BundleStatus.PENDING)
    return [settled, CHECK_CHANGED, *slots.room(state)]


def _bundle_turned_away(state: State, event: ev.BundleTurnedAway, at_ms: int) -> list[Effect]:
    is_open = event.lease_id in state.leases
    effects = endings.give_back(state, event.lease_id, LeaseEnd.RETURNED, at_ms) if is_open else []
    lease = state.workers[event.worker].ended_lease(event.lease_id)
    assert lease is not None
    assert lease.bundle is None
    lease.bundle = event.bundle
    return [*effects, refusals.refuse_late(state, lease, event.num_rollouts, event.reason, event.detail)]


_HANDLERS: dict[type, Callable[[State, Any, int], list[Effect]]] = {
    ev.WorkerJoined: _worker_joined,
    ev.SpeedClaimed: _speed_claimed,
    ev.WorkerLeft: _worker_left,
    ev.WorkersLost: _workers_lost,
    ev.WorkerBanned: _worker_banned,
    ev.WorkerUnbanned: _worker_unbanned,
    PersonBanned: _person_banned,
    PersonUnbanned: _person_unbanned,
    MachineRevoked: _machine_revoked,
    ev.LeaseGranted: _lease_granted,
    ev.LeaseReturned: _lease_returned,
    ev.LeasesExpired: _leases_expired,
    ev.BundleArrived: _bundle_arrived,
    ev.BundleTurnedAway: _bundle_turned_away,
    ev.BundleContradicted: verdicts.bundle_contradicted,
    ev.VerdictGiven: verdicts.verdict_given,
    ev.EscrowReleased: verdicts.escrow_released,
    ev.CalibrationAdded: _calibration_added,
    **batches.HANDLERS,
    **failing.HANDLERS,
    **operator_orders.HANDLERS,
}
