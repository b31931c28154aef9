"""Ends of leases, also those of a worker that leaves. Used by tick.py, verdicts.py and refusals.py."""

from __future__ import annotations

from itertools import islice, takewhile

from prime_node.coordinator.state import audits, newcomers, persons, slots
from prime_node.coordinator.state.effects import (
    LEASE_CHANGED,
    BundleForgotten,
    Effect,
    LeaseEnded,
)
from prime_node.coordinator.state.records import (
    WASTED_MAX,
    LeaseEnd,
    LeaseRecord,
    PendingBundle,
    State,
    WorkerRecord,
)
from prime_node.coordinator.state.slot_records import StepSlots

LEASES_REMEMBERED_MAX = 64
"""Ended leases kept per worker."""
LEASES_REMEMBERED_MIN = 16
"""Ended leases kept of each worker however many workers there are: four times the default maximum of open leases."""
LEASES_REMEMBERED_TOTAL = 2**14
"""Ended leases of all workers, if LEASES_REMEMBERED_MIN allows it.

A snapshot holds them, half a kilobyte each, and blocks all requests. 64 leases of each of 1,000 workers would be 32 MB and a
fifth of a second; 16 are 8 MB and a twentieth."""
WORKERS_REMEMBERED_FACTOR = 4
"""Workers remembered, as a multiple of `workers_max`. Beyond it, inactive workers are forgotten (newcomers.py)."""
WASTED_PAUSE_MS = 1_000
"""Pause after a worker's second abandoned lease in a row. It doubles with each further one, ..."""
WASTED_PAUSE_MS_MAX = 60_000
"""... up to this."""


def stop_waiting(state: State, worker: WorkerRecord, pending: PendingBundle, step: StepSlots | None) -> list[Effect]:
    """Remove a pending bundle of `step`. The caller recounts its worker."""
    del state.bundles[pending.bundle]
    worker.pending = without(worker.pending, pending.bundle)
    _remember_ended(worker, pending.lease)
    # If other workers filled the slots of its step and the step is trained, nothing else would delete its bytes.
    return [BundleForgotten(pending.bundle)] if step is None and pending.bundle not in state.evidence else []


def give_back(state: State, lease_id: str, end: LeaseEnd, at_ms: int) -> list[Effect]:
    """End an open lease without a bundle. A worker that does so repeatedly has to pause (scheduler.py)."""
    lease = state.leases[lease_id]
    worker = end_lease(state, lease, end)
    is_wanted = end is LeaseEnd.CANCELLED or (end is LeaseEnd.RETURNED and _is_requeued(state, lease))
    if not is_wanted:
        note_wasted(state, worker, at_ms)
    return [LeaseEnded(lease), *slots.release_slots(state, state.step_of(lease), lease)]


def _is_requeued(state: State, lease: LeaseRecord) -> bool:
    """Return whether a run wants a lease to be returned, because a newer policy serves its slots."""
    return state.rules.requeues and lease.policy_version < state.head


def note_wasted(state: State, worker: WorkerRecord, at_ms: int) -> None:
    """Count a lease without result. From the second one in a row on, the worker has to pause."""
    worker.wasted += 1
    audits.abandoned(state, worker)
    if worker.is_wasteful:
        doubled = WASTED_PAUSE_MS << min(worker.wasted - WASTED_MAX, 16)
        worker.pause_until_ms = at_ms + min(doubled, WASTED_PAUSE_MS_MAX)


def leave(state: State, worker: WorkerRecord, at_ms: int) -> list[Effect]:
    """Let a worker leave. Its open leases, and those that it returned just before, count as abandoned.

    If it comes back, it is offered them again as they were (scheduler.py), and then they do not count. Slots, policy and
    draws determine problems and seeds, so this is no second choice. Only the first leave since its last accepted bundle
    has this effect, so no worker can hold slots by leaving again and again.
    """
    handed_back = (LeaseEnd.RETURNED, LeaseEnd.CANCELLED)
    ended = takewhile(lambda lease: lease.end in handed_back and lease.bundle is None, reversed(worker.ended))
    num_held = state.rules.leases_per_worker_max - len(worker.leases)  # it held no more when it began to hand back
    newest = [lease for lease in islice(ended, num_held) if lease.end is LeaseEnd.RETURNED]
    returned = [lease for lease in newest if not _is_requeued(state, lease)]
    may_resume = not worker.resumed and worker.wasted - len(returned) < WASTED_MAX
    left = [*(lease.lease_id for lease in reversed(returned)), *worker.leases]
    worker.left = tuple(left) if may_resume else ()
    return deactivate(state, worker, at_ms)


def resume(worker: WorkerRecord, lease: LeaseRecord) -> None:
    """Compare a new lease with those that its worker left with: the same one no longer counts as abandoned.

    Another lease ends the offer. The audits keep what the abandoned lease cost.
    """
    work = (lease.slots, lease.draws, lease.policy_version)
    for lease_id in worker.left:
        before = worker.ended_lease(lease_id)
        if before is not None and (before.slots, before.draws, before.policy_version) == work:
            worker.left = without(worker.left, lease_id)
            worker.resumed = True
            worker.wasted = max(0, worker.wasted - 1)
            worker.pause_until_ms = worker.pause_until_ms if worker.is_wasteful else 0
            return
    worker.left = ()


def without(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return the names without `name`, which is nearly always the only one."""
    return tuple([other for other in names if other != name]) if len(names) > 1 else ()


def end_lease(state: State, lease: LeaseRecord, end: LeaseEnd) -> WorkerRecord:
    """End an open lease. The caller releases its slots."""
    del state.leases[lease.lease_id]
    worker = state.workers[lease.worker]
    worker.leases = without(worker.leases, lease.lease_id)
    newcomers.recount(state, worker)
    lease.end = end
    _remember_ended(worker, lease)
    return worker


def leases_remembered(state: State) -> int:
    """Return how many ended leases a worker keeps when it gets one more.

    A late bundle for a forgotten lease is not accepted. A second bundle for it, or a copy found later, costs its worker
    nothing. So a cheat has to abandon this many leases, with ever longer pauses, to get away with either.
    """
    fitting, in_hand = LEASES_REMEMBERED_TOTAL // len(state.workers), state.rules.bundles_pending_per_worker_max
    return min(LEASES_REMEMBERED_MAX, max(fitting, LEASES_REMEMBERED_MIN, 2 * in_hand))


def forget_ended(worker: WorkerRecord, kept: int) -> None:
    """Drop all but the newest `kept` leases."""
    if len(worker.ended) > kept:
        worker.ended = worker.ended[-kept:]


def _remember_ended(worker: WorkerRecord, lease: LeaseRecord) -> None:
    worker.ended += (lease,)
    forget_ended(worker, LEASES_REMEMBERED_MAX)


def lapse_leases(state: State, worker: WorkerRecord, at_ms: int) -> list[Effect]:
    """Let all open leases of a worker lapse."""
    return [effect for lease in worker.leases for effect in give_back(state, lease, LeaseEnd.LAPSED, at_ms)]


def deactivate(state: State, worker: WorkerRecord, at_ms: int) -> list[Effect]:
    """Make a worker inactive."""
    effects = lapse_leases(state, worker, at_ms)
    state.num_active -= worker.active
    worker.active = False
    newcomers.recount(state, worker)
    if not worker.has_history:
        newcomers.leave_network(state, worker)
        persons.leave_person(state, worker)
        del state.workers[worker.worker]
    elif len(state.workers) > WORKERS_REMEMBERED_FACTOR * state.rules.workers_max:
        effects += _forget_one(state)
    return effects if LEASE_CHANGED in effects else [*effects, *slots.room(state)]


def _forget_one(state: State) -> list[Effect]:
    """Forget one inactive worker. A banned key's evidence goes with it: the operator has the ban dossier (dossiers.py)."""
    worker = newcomers.forget_one(state)
    if worker is not None:
        persons.leave_person(state, worker)
    bundle = None if worker is None or worker.banned is None else worker.banned.evidence
    if bundle is None:
        return []
    state.evidence.remove(bundle)
    is_of_the_window = bundle in state.step_bundles()
    return [] if is_of_the_window else [BundleForgotten(bundle)]
