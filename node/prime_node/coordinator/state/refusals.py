"""Rejection of a bundle and its consequences for the worker. Every rejection of the run is made here.

refuse_late       a bundle that came too late for its lease: only its receipt is kept
refuse_pending    a bundle without a verdict: its slots are open again
refuse_judged     the same by a verdict or by the worker's own signatures, which may prove dishonesty
refuse_accepted   an accepted bundle, by evidence that came later: its untrained groups are dropped

A bundle that can only be dishonest costs its worker a strike, the tokens in escrow (audits.py), its unaudited bundles, and
perhaps a ban. `banish` rejects the pending bundles of a banned worker.
"""

from __future__ import annotations

from prime_node.coordinator.state import endings, newcomers, slots, suspicion
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import LEASE_CHANGED, BundleForgotten, Effect, Settled, WorkerWasBanned
from prime_node.coordinator.state.records import Ban, LeaseRecord, PendingBundle, State, WorkerRecord
from prime_protocol.evidence import Weighed
from prime_protocol.verdict import BundleStatus, RejectReason

UNPROVEN_DETAIL = "not audited, and the worker was caught cheating before an audit could confirm it"


def refuse_late(state: State, lease: LeaseRecord, num_rollouts: int, reason: RejectReason, detail: str) -> Settled:
    """Reject a bundle whose lease has ended without one."""
    lease.reason, lease.detail = reason, detail
    return _settle_refused(state, state.workers[lease.worker], lease, num_rollouts, reason, detail)


def refuse_pending(
    state: State, pending: PendingBundle, reason: RejectReason, detail: str, weighed: Weighed | None = None
) -> list[Effect]:
    """Reject a bundle that has no verdict. `weighed` is the evidence that its receipt states."""
    lease = pending.lease
    step, worker = state.step_of(lease), state.workers[lease.worker]
    forgotten = endings.stop_waiting(state, worker, pending, step)
    newcomers.recount(state, worker)
    lease.reason, lease.detail = reason, detail
    settled = _settle_refused(state, worker, lease, pending.num_rollouts, reason, detail, weighed)
    return [settled, *forgotten, *slots.release_slots(state, step, lease)]


def refuse_judged(
    state: State, pending: PendingBundle, reason: RejectReason, detail: str, weighed: Weighed | None, at_ms: int
) -> list[Effect]:
    """Reject a bundle that has no verdict, and penalize its worker if the reason is dishonest."""
    effects = refuse_pending(state, pending, reason, detail, weighed)
    if reason.is_dishonest:
        effects += _penalize(state, state.workers[pending.lease.worker], pending.bundle, reason, weighed, at_ms)
    return _without_evidence(state, effects)


def refuse_accepted(
    state: State,
    lease: LeaseRecord,
    reason: RejectReason,
    detail: str,
    replaced: tuple[ev.Replaced, ...],
    at_ms: int,
) -> list[Effect]:
    """Reject an accepted bundle as dishonest, drop its groups that are untrained, and penalize its worker.

    A new receipt with the same evidence replaces its receipt, so that the worker's numbered receipts have no gap.
    """
    worker = state.workers[lease.worker]
    if worker.banned is not None or lease.reason is not None:
        return []
    assert lease.bundle is not None
    before = next(one for one in replaced if one.bundle == lease.bundle)
    settled, reopened = _take_back(state, worker, lease, reason, detail, before.weighed)
    effects: list[Effect] = [settled, *([LEASE_CHANGED] if reopened else ())]
    effects += _penalize(state, worker, lease.bundle, reason, None, at_ms)
    return _without_evidence(state, effects)


def banish(state: State, worker: WorkerRecord, ban: Ban) -> list[Effect]:
    """Ban a worker: its leases end, and its pending bundles are rejected."""
    worker.banned = ban
    if ban.evidence is not None:
        state.evidence.append(ban.evidence)
    newcomers.banned(state, worker, ban.at_ms)
    effects = [WorkerWasBanned(worker.worker, ban), *endings.deactivate(state, worker, ban.at_ms)]
    for bundle in worker.pending:
        effects += refuse_pending(state, state.bundles[bundle], RejectReason.BANNED, "the worker was banned meanwhile")
    return effects


def forfeit_escrow(state: State, worker: WorkerRecord) -> list[Effect]:
    """Forfeit a worker's escrow, and reject the accepted bundles in it that were not audited."""
    worker.audit_score = 0
    newcomers.recount(state, worker)
    forfeited, worker.escrow = worker.escrow, []
    effects: list[Effect] = []
    reopened = False
    for one in forfeited:
        if not one.audited:
            settled, reopened_here = _take_back(
                state, worker, one.lease, RejectReason.UNPROVEN, UNPROVEN_DETAIL, one.weighed
            )
            effects.append(settled)
            reopened |= reopened_here
    return [*effects, LEASE_CHANGED] if reopened else effects


def _penalize(
    state: State, worker: WorkerRecord, bundle: str, reason: RejectReason, weighed: Weighed | None, at_ms: int
) -> list[Effect]:
    """Penalize a worker for a bundle that can only be dishonest, and whose receipt states it."""
    worker.strikes += 1
    effects = forfeit_escrow(state, worker)
    for unaudited in [each for each in worker.pending if not state.bundles[each].audited]:
        effects += refuse_pending(state, state.bundles[unaudited], RejectReason.UNPROVEN, UNPROVEN_DETAIL)
    ban = suspicion.ban_after(state, worker, bundle, reason, weighed, at_ms)
    return effects if ban is None else effects + banish(state, worker, ban)


def _take_back(
    state: State,
    worker: WorkerRecord,
    lease: LeaseRecord,
    reason: RejectReason,
    detail: str,
    weighed: Weighed | None,
) -> tuple[Settled, bool]:
    """Reject an accepted bundle: reopen those of its groups that no batch has taken.

    Return the bundle's new receipt, and whether any group was reopened. `weighed` is the evidence in its old receipt.
    """
    bundle, num_rollouts = lease.bundle, len(lease.slots) * state.rules.rollouts_per_group
    worker.escrow = [one for one in worker.escrow if one.lease.bundle != bundle]
    step = state.step_of(lease)
    dropped = [
        slot
        for slot in (lease.slots if step is not None else ())
        if step is not None
        and slot not in step.taken
        and slot in step.accepted
        and step.accepted[slot].bundle == bundle
    ]
    for slot in dropped:
        assert step is not None
        slots.drop(state, step, slot)
    for known in (lease, worker.ended_lease(lease.lease_id) or lease):  # two records after a restart
        known.reason, known.detail = reason, detail
    worker.accepted -= num_rollouts
    state.accepted -= num_rollouts
    kept = weighed if suspicion.still_counts(worker, lease) else None
    return _settle_refused(state, worker, lease, num_rollouts, reason, detail, kept), bool(dropped)


def _settle_refused(
    state: State,
    worker: WorkerRecord,
    lease: LeaseRecord,
    num_rollouts: int,
    reason: RejectReason,
    detail: str,
    weighed: Weighed | None = None,
) -> Settled:
    """Count a rejection for the worker and the run, and return the effect that makes its receipt."""
    assert lease.bundle is not None
    for counts in (worker.refused, state.refused):
        counts[reason] = counts.get(reason, 0) + num_rollouts
    return Settled(lease.bundle, lease, num_rollouts, 0, BundleStatus.REFUSED, reason, detail, weighed)


def _without_evidence(state: State, effects: list[Effect]) -> list[Effect]:
    """Drop the effects that would delete the evidence of a ban."""
    return [one for one in effects if not (isinstance(one, BundleForgotten) and one.bundle in state.evidence)]
