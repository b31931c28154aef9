"""The coordinator's state machine: `tick` folds one event into the state and says what follows from it.

Rule 1: everything that decides what is leased, accepted, trained or banned is in `State` and changes only here. The same
events give the same state on every machine: `tick` reads no clock, draws no random number and does no I/O. Who was last
heard of when, and which validator looks at which bundle, decide nothing that outlives a restart and are kept elsewhere.

Rule 2: each slot of a step in the window is open, held by leases and pending bundles, or accepted (slots.py). A slot that comes
back keeps its number, so a step can always become full (invariants.py says it in code).

Rule 3: memory is bounded by the window (steps with a slot that is not trained and durable, up to the last that may be leased)
and by the number of workers. What became of a bundle for ever is in its receipt, in the store.

Whoever decides on an event (scheduler.py, intake.py, ...) has checked that it is possible; here that is asserted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prime_node.coordinator.state import audits, batches, copies, newcomers, slots, suspicion
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.records import (
    BATCH_NEWS,
    CHECK_NEWS,
    LEASE_NEWS,
    WASTED_MAX,
    Ban,
    Banned,
    BundleForgotten,
    Effect,
    LeaseEnd,
    LeaseRecord,
    Original,
    PendingBundle,
    Settled,
    State,
    Worker,
)
from prime_node.coordinator.state.slot_records import AcceptedGroup
from prime_protocol.evidence import Weighed
from prime_protocol.verdict import BanKind, BundleStatus, RejectReason

LEASES_REMEMBERED_MAX = 64
"""Ended leases kept for each worker, so that a late upload gets a precise answer."""
WORKERS_REMEMBERED_FACTOR = 4
"""Beyond this many times `workers_max`, workers that went away are forgotten, oldest first. The banned are not."""
WASTED_PAUSE_MS = 1_000
"""A worker waits this long after its second wasted lease in a row, twice as long after each further one, ..."""
WASTED_PAUSE_MS_MAX = 60_000
"""... up to this."""


def tick(state: State, event: ev.Event, at_ms: int) -> list[Effect]:
    """Change `state` as `event` says; returns what follows, in order."""
    return _HANDLERS[type(event)](state, event, at_ms)


# Workers


def _worker_joined(state: State, event: ev.WorkerJoined, at_ms: int) -> list[Effect]:
    worker = state.workers.get(event.worker) or Worker(event.worker, "", "", "", 0, at_ms)
    assert worker.banned is None
    effects = _lapse_leases(state, worker, at_ms)
    state.workers.pop(event.worker, None)  # and put back at the end: the order is that of joining
    worker.name, worker.software, worker.engine = event.name, event.software, event.engine
    worker.rollouts_max, worker.hardware, worker.joined_at_ms = event.rollouts_max, event.hardware, at_ms
    state.num_active += not worker.active
    worker.active = True
    state.workers[event.worker] = worker
    worker.invite = event.invite or worker.invite
    newcomers.enter(state, worker, event.network)
    return effects


def _worker_left(state: State, event: ev.WorkerLeft, at_ms: int) -> list[Effect]:
    return _deactivate(state, state.workers[event.worker], at_ms)


def _workers_lost(state: State, event: ev.WorkersLost, at_ms: int) -> list[Effect]:
    return [effect for worker in event.workers for effect in _deactivate(state, state.workers[worker], at_ms)]


def _worker_banned(state: State, event: ev.WorkerBanned, at_ms: int) -> list[Effect]:
    return _ban(
        state, state.workers[event.worker], Ban(at_ms, state.current_step, event.reason, None, BanKind.OPERATOR)
    )


def _worker_unbanned(state: State, event: ev.WorkerUnbanned, at_ms: int) -> list[Effect]:
    worker = state.workers[event.worker]
    if worker.banned is not None and worker.banned.evidence is not None:
        state.evidence.remove(worker.banned.evidence)
    worker.banned, worker.strikes, worker.streak = None, 0, 0
    suspicion.forgive(worker)
    worker.wasted, worker.pause_until_ms = 0, 0
    return []


# Leases


def _lease_granted(state: State, event: ev.LeaseGranted, at_ms: int) -> list[Effect]:
    worker = state.workers[event.worker]
    step = (state.evaluations if state.is_evaluation(event.slots) else state.steps)[event.step]
    assert worker.active
    assert worker.banned is None
    attempts = tuple(step.attempts.get(slot, 0) for slot in event.slots)
    step.attempts.update((slot, attempt + 1) for slot, attempt in zip(event.slots, attempts, strict=True))
    lease = LeaseRecord(
        lease_id=event.lease_id,
        worker=event.worker,
        step=event.step,
        policy_version=event.policy_version,
        policy_digest=event.policy_digest,
        slots=event.slots,
        attempts=attempts,
        issued_at_ms=at_ms,
        expires_at_ms=event.expires_at_ms,
    )
    state.leases[event.lease_id] = lease
    if event.draws:
        state.curriculum.drawn(event.slots, event.draws)
    slots.hold(state, lease)
    worker.leases.append(event.lease_id)
    state.num_leases += 1
    return []


def _lease_returned(state: State, event: ev.LeaseReturned, at_ms: int) -> list[Effect]:
    return _give_back(state, event.lease_id, LeaseEnd.RETURNED, at_ms)


def _leases_expired(state: State, event: ev.LeasesExpired, at_ms: int) -> list[Effect]:
    return [effect for lease in event.lease_ids for effect in _give_back(state, lease, LeaseEnd.LAPSED, at_ms)]


# Bundles


def _bundle_arrived(state: State, event: ev.BundleArrived, at_ms: int) -> list[Effect]:
    worker = state.workers[event.worker]
    lease = state.lease_of(event.lease_id, event.worker)
    assert lease is not None
    assert lease.worker == event.worker
    assert state.is_redeemable(lease)
    step = state.step_of(lease)
    assert step is not None
    if lease.end is None:
        del state.leases[lease.lease_id]
        worker.leases.remove(lease.lease_id)
    else:  # lapsed, but nobody took over
        del worker.ended[lease.lease_id]
        slots.hold(state, lease)
    lease.end, lease.bundle = LeaseEnd.REDEEMED, event.bundle
    step.bundles.append(event.bundle)
    worker.pending[lease.lease_id] = event.bundle
    state.bundles[event.bundle] = PendingBundle(
        event.bundle, lease, event.num_rollouts, event.num_bytes, at_ms, event.audited, event.seeded
    )
    batches.measure(state, worker, lease, event.num_rollouts, at_ms)
    settled = Settled(event.bundle, lease, event.num_rollouts, 0, BundleStatus.PENDING)
    return [settled, CHECK_NEWS, *slots.room(state)]


def _bundle_turned_away(state: State, event: ev.BundleTurnedAway, at_ms: int) -> list[Effect]:
    is_open = event.lease_id in state.leases
    effects = _give_back(state, event.lease_id, LeaseEnd.RETURNED, at_ms) if is_open else []
    lease = state.workers[event.worker].ended[event.lease_id]
    assert lease.bundle is None
    lease.bundle = event.bundle
    return [*effects, _refused(state, lease, event.num_rollouts, event.reason, event.detail)]


def _verdict_given(state: State, event: ev.VerdictGiven, at_ms: int) -> list[Effect]:
    pending = state.bundles[event.bundle]
    worker = state.workers[pending.lease.worker]
    unverifiable = event.reason is RejectReason.UNVERIFIABLE
    state.unverifiable = state.unverifiable + 1 if unverifiable else 0
    state.unverifiable_detail = event.detail if unverifiable else ""
    weighed = suspicion.weigh(state.rules, worker, event.evidence)
    reason, detail = event.reason, event.detail
    if reason is None and (original := copies.found_earlier(state, pending, event.fingerprints)) is not None:
        reason, detail = RejectReason.COPIED, f"bundle {original.bundle[:12]} said the same before"
    if (reason is None or not reason.is_dishonest) and suspicion.is_proven(state.rules, weighed):
        reason, detail = RejectReason.STATISTICAL, suspicion.ALL_TOGETHER
    if reason is None:
        later = copies.found_later(state, pending, event.fingerprints)
        copies.remember(state, pending, event.fingerprints)
        effects = _accept(state, pending, event, weighed)
        return effects + [effect for one in later for effect in _accepted_copy(state, one, at_ms)]
    effects = _refuse(state, pending, reason, detail, weighed)
    if reason is RejectReason.INCOMPLETE:
        _wasted(state, worker, at_ms)
    if reason.is_dishonest:
        effects += _found_out(state, worker, event.bundle, reason, weighed, at_ms)
    return [effect for effect in effects if not _is_kept(state, effect)]


def _is_kept(state: State, effect: Effect) -> bool:
    return isinstance(effect, BundleForgotten) and effect.bundle in state.evidence


def _found_out(
    state: State, worker: Worker, bundle: str, reason: RejectReason, weighed: Weighed | None, at_ms: int
) -> list[Effect]:
    """What follows for a worker from a bundle that could only be dishonest, whose receipt says so."""
    worker.strikes += 1
    effects = audits.found_out(state, worker)
    for unaudited in [each for each in worker.pending.values() if not state.bundles[each].audited]:
        effects += _refuse(state, state.bundles[unaudited], RejectReason.UNPROVEN, audits.TAKEN_BACK)
    ban = suspicion.ban_after(state, worker, bundle, reason, weighed, at_ms)
    return effects if ban is None else effects + _ban(state, worker, ban)


def _accepted_copy(state: State, copy: Original, at_ms: int) -> list[Effect]:
    """A bundle that was judged and accepted before the original was."""
    worker = state.workers.get(copy.worker)
    lease = None if worker is None else next((one for one in worker.ended.values() if one.bundle == copy.bundle), None)
    if worker is None or lease is None:
        return []
    return _refuse_after_all(state, worker, lease, RejectReason.COPIED, copies.SAID_BEFORE, at_ms)


def _bundle_contradicted(state: State, event: ev.BundleContradicted, at_ms: int) -> list[Effect]:
    worker, lease = state.workers[event.worker], state.lease_of(event.lease_id, event.worker)
    assert lease is not None
    detail = f"its worker signed another bundle for the same lease too: {event.other[:12]}"
    if lease.bundle not in state.bundles:
        return _refuse_after_all(state, worker, lease, RejectReason.EQUIVOCATION, detail, at_ms)
    effects = _refuse(state, state.bundles[lease.bundle], RejectReason.EQUIVOCATION, detail)
    effects += _found_out(state, worker, lease.bundle, RejectReason.EQUIVOCATION, None, at_ms)
    return [effect for effect in effects if not _is_kept(state, effect)]


def _refuse_after_all(
    state: State, worker: Worker, lease: LeaseRecord, reason: RejectReason, detail: str, at_ms: int
) -> list[Effect]:
    """An accepted bundle turns out to be dishonest. Its groups are taken back as far as they are untrained."""
    if worker.banned is not None or lease.reason is not None:
        return []
    assert lease.bundle is not None
    suspicion.forgive(worker)  # its numbered receipts have a gap from now on: one of them is replaced
    settled, reopened = audits.take_back(state, worker, lease, reason, detail)
    effects: list[Effect] = [settled, *([LEASE_NEWS] if reopened else ())]
    return effects + _found_out(state, worker, lease.bundle, reason, None, at_ms)


_HANDLERS: dict[type, Callable[[State, Any, int], list[Effect]]] = {
    ev.WorkerJoined: _worker_joined,
    ev.WorkerLeft: _worker_left,
    ev.WorkersLost: _workers_lost,
    ev.WorkerBanned: _worker_banned,
    ev.WorkerUnbanned: _worker_unbanned,
    ev.LeaseGranted: _lease_granted,
    ev.LeaseReturned: _lease_returned,
    ev.LeasesExpired: _leases_expired,
    ev.BundleArrived: _bundle_arrived,
    ev.BundleTurnedAway: _bundle_turned_away,
    ev.BundleContradicted: _bundle_contradicted,
    ev.VerdictGiven: _verdict_given,
    **batches.HANDLERS,
}


# What several events have in common


def _accept(state: State, pending: PendingBundle, event: ev.VerdictGiven, weighed: Weighed | None) -> list[Effect]:
    lease, size = pending.lease, state.rules.rollouts_per_group
    assert len(event.rewards) == size * len(lease.slots) == pending.num_rollouts
    forgotten = _stop_waiting(state, pending)
    rewards, versions, unscored = event.rewards, event.versions, event.unscored
    for index, slot in enumerate(lease.slots):
        first = index * size
        group = AcceptedGroup(
            lease.worker,
            lease.policy_version,
            event.bundle,
            first,
            rewards[first : first + size],
            order=state.num_accepted_groups,
        )
        if versions:
            group.oldest_version, group.end_version = versions[index]
        if unscored:
            group.unscored = tuple(place - first for place in unscored if first <= place < first + size)
        slots.fill(state, lease, slot, group)
    effects = [*forgotten, *slots.let_go(state, lease), *_end_overtaken(state, lease)]
    worker = state.workers[lease.worker]
    worker.accepted += pending.num_rollouts
    worker.wasted, worker.pause_until_ms = 0, 0
    state.accepted += pending.num_rollouts
    num_tokens, detail = audits.credit(state, worker, pending, event.num_tokens)
    settled = Settled(
        event.bundle, lease, pending.num_rollouts, num_tokens, BundleStatus.ACCEPTED, detail=detail, weighed=weighed
    )
    if not batches.may_be_ready(state, lease.step):
        return [settled, *effects, *slots.room(state)]
    # The last step of the run being full is news for those who wait for a lease, too: there will be none.
    return [settled, BATCH_NEWS, *effects, *([LEASE_NEWS] if state.is_complete else slots.room(state))]


def _end_overtaken(state: State, lease: LeaseRecord) -> list[Effect]:
    """Others' leases of the same slots end once all of them are filled: where the run wants no copies, they were silent."""
    step = state.step_of(lease)
    others = {other for slot in lease.slots for other in step.held.get(slot, ())} if step is not None else ()
    effects: list[Effect] = []
    for other in (state.leases[lease_id] for lease_id in sorted(others) if lease_id in state.leases):
        if step is not None and all(slot in step.accepted for slot in other.slots):
            worker = _end(state, other, LeaseEnd.OVERTAKEN)
            if state.rules.leases_per_slot_max == 1:
                worker.wasted += 1
                audits.abandoned(state, worker)
            effects += slots.let_go(state, other)
    return effects


def _refuse(
    state: State, pending: PendingBundle, reason: RejectReason, detail: str, weighed: Weighed | None = None
) -> list[Effect]:
    forgotten = _stop_waiting(state, pending)
    settled = _refused(state, pending.lease, pending.num_rollouts, reason, detail)
    settled.weighed = weighed
    return [settled, *forgotten, *slots.let_go(state, pending.lease)]


def _refused(state: State, lease: LeaseRecord, num_rollouts: int, reason: RejectReason, detail: str) -> Settled:
    """Note a refusal everywhere it is counted."""
    assert lease.bundle is not None
    lease.reason, lease.detail = reason, detail
    worker = state.workers[lease.worker]
    for counts in (worker.refused, state.refused):
        counts[reason] = counts.get(reason, 0) + num_rollouts
    return Settled(lease.bundle, lease, num_rollouts, 0, BundleStatus.REFUSED, reason, detail)


def _stop_waiting(state: State, pending: PendingBundle) -> list[Effect]:
    worker = state.workers[pending.lease.worker]
    del state.bundles[pending.bundle]
    del worker.pending[pending.lease.lease_id]
    _remember_ended(worker, pending.lease)
    # Where its step was trained meanwhile, with the groups of others, nothing else would delete its bytes.
    is_late = state.step_of(pending.lease) is None and pending.bundle not in state.evidence
    return [BundleForgotten(pending.bundle)] if is_late else []


def _give_back(state: State, lease_id: str, end: LeaseEnd, at_ms: int) -> list[Effect]:
    """End an open lease without a bundle. Whoever does so again and again is made to wait (scheduler.py)."""
    lease = state.leases[lease_id]
    worker = _end(state, lease, end)
    if state.rules.requeues and end is LeaseEnd.RETURNED and lease.policy_version < state.head:
        return slots.let_go(state, lease)
    _wasted(state, worker, at_ms)
    return slots.let_go(state, lease)


def _wasted(state: State, worker: Worker, at_ms: int) -> None:
    """A lease brought nothing."""
    worker.wasted += 1
    audits.abandoned(state, worker)
    if worker.is_wasteful:
        doubled = WASTED_PAUSE_MS << min(worker.wasted - WASTED_MAX, 16)
        worker.pause_until_ms = at_ms + min(doubled, WASTED_PAUSE_MS_MAX)


def _end(state: State, lease: LeaseRecord, end: LeaseEnd) -> Worker:
    """An open lease is open no longer. Its slots are the caller's."""
    del state.leases[lease.lease_id]
    worker = state.workers[lease.worker]
    worker.leases.remove(lease.lease_id)
    lease.end = end
    _remember_ended(worker, lease)
    return worker


def _remember_ended(worker: Worker, lease: LeaseRecord) -> None:
    worker.ended[lease.lease_id] = lease
    if len(worker.ended) > LEASES_REMEMBERED_MAX:
        del worker.ended[next(iter(worker.ended))]


def _lapse_leases(state: State, worker: Worker, at_ms: int) -> list[Effect]:
    return [effect for lease in list(worker.leases) for effect in _give_back(state, lease, LeaseEnd.LAPSED, at_ms)]


def _deactivate(state: State, worker: Worker, at_ms: int) -> list[Effect]:
    effects = _lapse_leases(state, worker, at_ms)
    state.num_active -= worker.active
    worker.active = False
    newcomers.recount(state, worker.network)
    if not worker.has_history:
        newcomers.leave(state, worker)
        del state.workers[worker.worker]
    elif len(state.workers) > WORKERS_REMEMBERED_FACTOR * state.rules.workers_max:
        newcomers.forget_one(state)
    return effects or slots.room(state)


def _ban(state: State, worker: Worker, ban: Ban) -> list[Effect]:
    """Nothing of a banned worker is taken any more: leases end, and what waits for a verdict is refused."""
    worker.banned = ban
    if ban.evidence is not None:
        state.evidence.append(ban.evidence)
    effects = [Banned(worker.worker, ban), *_deactivate(state, worker, ban.at_ms)]
    for bundle in list(worker.pending.values()):
        effects += _refuse(state, state.bundles[bundle], RejectReason.BANNED, "the worker was banned meanwhile")
    return effects
