"""How leases and bundles end, and what a worker's going or ban means for those that it has. For tick.py and verdicts.py."""

from __future__ import annotations

from prime_node.coordinator.state import audits, newcomers, slots
from prime_node.coordinator.state.effects import (
    LEASE_NEWS,
    BundleForgotten,
    Effect,
    LeaseEnded,
    Settled,
    WorkerWasBanned,
)
from prime_node.coordinator.state.records import (
    WASTED_MAX,
    Ban,
    LeaseEnd,
    LeaseRecord,
    PendingBundle,
    State,
    WorkerRecord,
)
from prime_node.coordinator.state.slot_records import StepSlots
from prime_protocol.evidence import Weighed
from prime_protocol.verdict import BundleStatus, RejectReason

LEASES_REMEMBERED_MAX = 64
"""Ended leases kept for each worker."""
LEASES_REMEMBERED_MIN = 16
"""Twice what a worker may have in hand by default: all that lapsed at once, and all that replaced it."""
LEASES_REMEMBERED_TOTAL = 2**14
"""Of all workers, where LEASES_REMEMBERED_MIN allows it. A snapshot holds them, half a kilobyte each, and while it is made nobody
is answered: 64 of each of 1,000 workers would be 32 MB and a fifth of a second, 16 are 8 MB and a twentieth."""
WORKERS_REMEMBERED_FACTOR = 4
"""Beyond this many times `workers_max`, workers that went away are forgotten (newcomers.py)."""
WASTED_PAUSE_MS = 1_000
"""A worker waits this long after its second wasted lease in a row, twice as long after each further one, ..."""
WASTED_PAUSE_MS_MAX = 60_000
"""... up to this."""


def refuse(
    state: State, pending: PendingBundle, reason: RejectReason, detail: str, weighed: Weighed | None = None
) -> list[Effect]:
    """A bundle that waits gets its verdict."""
    step, worker = state.step_of(pending.lease), state.workers[pending.lease.worker]
    forgotten = stop_waiting(state, worker, pending, step)
    newcomers.recount(state, worker)
    settled = refused(state, pending.lease, pending.num_rollouts, reason, detail)
    settled.weighed = weighed
    return [settled, *forgotten, *slots.release_slots(state, step, pending.lease)]


def refused(state: State, lease: LeaseRecord, num_rollouts: int, reason: RejectReason, detail: str) -> Settled:
    """Note a refusal everywhere it is counted."""
    assert lease.bundle is not None
    lease.reason, lease.detail = reason, detail
    worker = state.workers[lease.worker]
    for counts in (worker.refused, state.refused):
        counts[reason] = counts.get(reason, 0) + num_rollouts
    return Settled(lease.bundle, lease, num_rollouts, 0, BundleStatus.REFUSED, reason, detail)


def stop_waiting(state: State, worker: WorkerRecord, pending: PendingBundle, step: StepSlots | None) -> list[Effect]:
    """A worker's bundle for a lease of `step` waits no longer. The caller counts its worker again."""
    del state.bundles[pending.bundle]
    worker.pending = without(worker.pending, pending.bundle)
    _remember_ended(worker, pending.lease)
    # Where its step was trained meanwhile, with the groups of others, nothing else would delete its bytes.
    return [BundleForgotten(pending.bundle)] if step is None and pending.bundle not in state.evidence else []


def give_back(state: State, lease_id: str, end: LeaseEnd, at_ms: int) -> list[Effect]:
    """End an open lease without a bundle. Whoever does so again and again is made to wait (scheduler.py)."""
    lease = state.leases[lease_id]
    worker = end_lease(state, lease, end)
    is_requeued = state.rules.requeues and end is LeaseEnd.RETURNED and lease.policy_version < state.head
    if not is_requeued:
        note_wasted(state, worker, at_ms)
    return [LeaseEnded(lease), *slots.release_slots(state, state.step_of(lease), lease)]


def note_wasted(state: State, worker: WorkerRecord, at_ms: int) -> None:
    """A lease brought nothing."""
    worker.wasted += 1
    audits.abandoned(state, worker)
    if worker.is_wasteful:
        doubled = WASTED_PAUSE_MS << min(worker.wasted - WASTED_MAX, 16)
        worker.pause_until_ms = at_ms + min(doubled, WASTED_PAUSE_MS_MAX)


def without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """All but one, which is nearly always all there is."""
    return tuple([other for other in names if other != name]) if len(names) > 1 else ()


def end_lease(state: State, lease: LeaseRecord, end: LeaseEnd) -> WorkerRecord:
    """An open lease is open no longer. Its slots are the caller's."""
    del state.leases[lease.lease_id]
    worker = state.workers[lease.worker]
    worker.leases = without(worker.leases, lease.lease_id)
    newcomers.recount(state, worker)
    lease.end = end
    _remember_ended(worker, lease)
    return worker


def leases_remembered(state: State) -> int:
    """How many ended leases a worker keeps when it is granted one more.

    Of a lease that is forgotten a late bundle is not taken, and neither a second bundle nor a copy that is found out costs its
    worker anything. So this is also how many leases a cheat has to waste, with ever longer pauses, to get away with either.
    """
    fitting, in_hand = LEASES_REMEMBERED_TOTAL // len(state.workers), state.rules.bundles_pending_per_worker_max
    return min(LEASES_REMEMBERED_MAX, max(fitting, LEASES_REMEMBERED_MIN, 2 * in_hand))


def forget_ended(worker: WorkerRecord, kept: int) -> None:
    """But for the last ones."""
    if len(worker.ended) > kept:
        worker.ended = worker.ended[-kept:]


def _remember_ended(worker: WorkerRecord, lease: LeaseRecord) -> None:
    worker.ended += (lease,)
    forget_ended(worker, LEASES_REMEMBERED_MAX)


def lapse_leases(state: State, worker: WorkerRecord, at_ms: int) -> list[Effect]:
    return [effect for lease in worker.leases for effect in give_back(state, lease, LeaseEnd.LAPSED, at_ms)]


def deactivate(state: State, worker: WorkerRecord, at_ms: int) -> list[Effect]:
    """A worker takes part no longer."""
    effects = lapse_leases(state, worker, at_ms)
    state.num_active -= worker.active
    worker.active = False
    newcomers.recount(state, worker)
    if not worker.has_history:
        newcomers.leave_network(state, worker)
        del state.workers[worker.worker]
    elif len(state.workers) > WORKERS_REMEMBERED_FACTOR * state.rules.workers_max:
        effects += _forget_one(state)
    return effects if LEASE_NEWS in effects else [*effects, *slots.room(state)]


def _forget_one(state: State) -> list[Effect]:
    """With a banned key goes what its ban rests on: the case is written and lies with the operator (cases.py)."""
    worker = newcomers.forget_one(state)
    bundle = None if worker is None or worker.banned is None else worker.banned.evidence
    if bundle is None:
        return []
    state.evidence.remove(bundle)
    is_of_the_window = bundle in state.step_bundles()
    return [] if is_of_the_window else [BundleForgotten(bundle)]


def banish(state: State, worker: WorkerRecord, ban: Ban) -> list[Effect]:
    """Nothing of a banned worker is taken any more: leases end, and what waits for a verdict is refused."""
    worker.banned = ban
    if ban.evidence is not None:
        state.evidence.append(ban.evidence)
    newcomers.banned(state, worker, ban.at_ms)
    effects = [WorkerWasBanned(worker.worker, ban), *deactivate(state, worker, ban.at_ms)]
    for bundle in worker.pending:
        effects += refuse(state, state.bundles[bundle], RejectReason.BANNED, "the worker was banned meanwhile")
    return effects
