"""Effects of verdicts: bundles are accepted, or rejected (refusals.py), and copies are found."""

from __future__ import annotations

from prime_node.coordinator.state import audits, batches, copies, endings, refusals, slots, suspicion
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import (
    BATCH_CHANGED,
    LEASE_CHANGED_FOR_ALL,
    BundleForgotten,
    Effect,
    LeaseEnded,
    Settled,
)
from prime_node.coordinator.state.records import (
    LeaseEnd,
    LeaseRecord,
    Original,
    PendingBundle,
    State,
    WorkerRecord,
)
from prime_node.coordinator.state.slot_records import AcceptedGroup, StepSlots
from prime_protocol.evidence import Weighed
from prime_protocol.verdict import BundleStatus, RejectReason


def verdict_given(state: State, event: ev.VerdictGiven, at_ms: int) -> list[Effect]:
    """Apply a verdict: accept or reject the bundle, and act on copies and cheats."""
    pending = state.bundles[event.bundle]
    worker = state.workers[pending.lease.worker]
    if event.reason is RejectReason.UNVERIFIABLE:
        state.unverifiable, state.unverifiable_detail = state.unverifiable + 1, event.detail
    elif state.unverifiable:
        state.unverifiable, state.unverifiable_detail = 0, ""
    weighed = suspicion.weigh(state.rules, worker, event.evidence)
    reason, detail = event.reason, event.detail
    marks = event.fingerprints
    if reason is None and marks and (original := copies.found_earlier(state, pending, marks)) is not None:
        reason, detail = RejectReason.COPIED, f"bundle {original.bundle[:12]} has the same completions and came before"
        pending.lease.original = original.bundle
    if (reason is None or not reason.is_dishonest) and suspicion.is_proven(state.rules, weighed):
        reason, detail = RejectReason.STATISTICAL, suspicion.ALL_TOGETHER
    if reason is None:
        later = copies.found_later(state, pending, marks) if marks else []
        if marks:
            copies.remember(state, pending, marks)
        effects = _accept(state, worker, pending, event, weighed)
        for one in later:
            effects += _accepted_copy(state, one, event, at_ms)
        return effects
    effects = refusals.refuse_judged(state, pending, reason, detail, weighed, at_ms)
    if event.logprobs:
        effects.append(BundleForgotten(event.logprobs))
    if reason is RejectReason.INCOMPLETE:
        endings.note_wasted(state, worker, at_ms)
    if event.unjudged and pending.audited:
        audits.unjudged(state, worker)
    return effects


def bundle_contradicted(state: State, event: ev.BundleContradicted, at_ms: int) -> list[Effect]:
    """Reject the first bundle of a worker that signed two for one lease."""
    lease = state.lease_of(event.lease_id, event.worker)
    assert lease is not None
    assert lease.worker == event.worker
    reason = RejectReason.EQUIVOCATION
    detail = f"its worker also signed another bundle for the same lease: {event.other[:12]}"
    if lease.bundle in state.bundles:
        return refusals.refuse_judged(state, state.bundles[lease.bundle], reason, detail, None, at_ms)
    return refusals.refuse_accepted(state, lease, reason, detail, event.replaced, at_ms)


def escrow_released(state: State, event: ev.EscrowReleased, at_ms: int) -> list[Effect]:
    """Credit the escrow of these workers."""
    return [audits.release(state, state.workers[worker]) for worker in event.workers]


def _accepted_copy(state: State, copy: Original, event: ev.VerdictGiven, at_ms: int) -> list[Effect]:
    """Reject a copy that was judged and accepted before the original was."""
    worker = state.workers.get(copy.worker)
    lease = None if worker is None else next((one for one in worker.ended if one.bundle == copy.bundle), None)
    if worker is None or lease is None:
        return []
    lease.original = event.bundle
    return refusals.refuse_accepted(state, lease, RejectReason.COPIED, copies.SAID_BEFORE, event.replaced, at_ms)


def _accept(
    state: State, worker: WorkerRecord, pending: PendingBundle, event: ev.VerdictGiven, weighed: Weighed | None
) -> list[Effect]:
    lease = pending.lease
    assert len(event.rewards) == state.rules.rollouts_per_group * len(lease.slots) == pending.num_rollouts
    step = state.step_of(lease)
    effects = endings.stop_waiting(state, worker, pending, step)
    if event.logprobs:
        if step is None:
            effects.append(BundleForgotten(event.logprobs))
        else:
            step.bundles.append(event.logprobs)
    if step is not None:
        _fill(state, step, lease, event)
        effects += slots.release_slots(state, step, lease)
        effects += _end_overtaken(state, step, lease)
    suspicion.note_accepted(state.rules, worker, event.evidence)
    worker.accepted += pending.num_rollouts
    worker.wasted, worker.pause_until_ms, worker.resumed = 0, 0, False
    state.accepted += pending.num_rollouts
    num_tokens, detail = audits.credit(state, worker, pending, event.num_tokens, weighed)
    settled = Settled(
        event.bundle,
        lease,
        pending.num_rollouts,
        num_tokens,
        BundleStatus.ACCEPTED,
        detail=detail,
        weighed=weighed,
    )
    if not batches.may_be_ready(state, lease.step):
        return [settled, *effects, *slots.room(state)]
    # A full last step also wakes the requests for a lease: there will be none.
    return [settled, BATCH_CHANGED, *effects, *([LEASE_CHANGED_FOR_ALL] if state.is_complete else slots.room(state))]


def _fill(state: State, step: StepSlots, lease: LeaseRecord, event: ev.VerdictGiven) -> None:
    size, unscored = state.rules.rollouts_per_group, event.unscored
    for index, slot in enumerate(lease.slots):
        first = index * size
        oldest_version, end_version = event.versions[index] if event.versions else (None, None)
        group = AcceptedGroup(
            lease.worker,
            lease.policy_version,
            event.bundle,
            first,
            event.rewards[first : first + size],
            oldest_version,
            end_version,
            state.num_accepted_groups,
            tuple(place - first for place in unscored if first <= place < first + size) if unscored else (),
            event.logprobs,
        )
        slots.fill(state, step, slot, group)


def _end_overtaken(state: State, step: StepSlots, lease: LeaseRecord) -> list[Effect]:
    """End other leases of these slots once all their slots are filled. If the run allows no copies, they count as abandoned."""
    if step.held.keys().isdisjoint(lease.slots):
        return []
    others = {other for slot in lease.slots for other in step.held.get(slot, ())}
    effects: list[Effect] = []
    for other in (state.leases[lease_id] for lease_id in sorted(others) if lease_id in state.leases):
        if all(slot in step.accepted for slot in other.slots):
            worker = endings.end_lease(state, other, LeaseEnd.OVERTAKEN)
            if state.rules.leases_per_slot_max == 1:
                worker.wasted += 1
                audits.abandoned(state, worker)
            effects += [LeaseEnded(other), *slots.release_slots(state, step, other)]
    return effects
