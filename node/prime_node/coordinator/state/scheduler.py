"""Choice of the slots that a worker is leased, as functions of the state. This file decides; `state.tick` applies the decision.

The rule (docs of step.py): a policy v may begin slot m if m < v R + floor(R (1 + eta)). The lowest open slots are leased first,
because the trainer waits for them. A slot that failed, expired, or was returned, rejected or dropped is among the lowest. So it
is the next to be leased, to a worker whose policy is fresh enough. No slot can be skipped and forgotten.

Evaluations come first (evaluations.py), because their policy is soon too old to be leased. A policy whose groups would be dropped
as stale is leased for nothing else (`is_useless`).

Fair share: while other workers take part, one worker holds at most ceil(R / workers) slots of one step at once. A faster worker
returns sooner and gets more; a single worker gets everything.

Newcomers: all keys of one network that have not passed their audits share one budget (newcomers.py).

Abandoned leases: from the second lapsed or returned lease in a row on, a worker holds one group at most. It pauses between
leases, longer each time, so that others first take the slots that it gave back. An accepted bundle ends this. Joining again
does not avoid it: every lease that ends without a bundle counts. One exception, for a worker that is stopped and started: it is
offered the leases that it left with again, unchanged, before anything else; one that it takes no longer counts (endings.py).

Slow workers (`slow_factor`): a worker slower than the average by this factor gets groups of the first step that it can finish
in time. It gets only as many as it can finish. If there is no such step, or later steps have no open slots, it takes one group
as usual: no slot stays open because a faster worker is missing.

Stragglers (`leases_per_slot_max`): a worker that finds no open slot gets the groups of the oldest lease that takes far longer
than usual. The first accepted bundle fills the slot, and the other lease ends without cost. Regardless of this setting, groups
of a worker without any bundle that takes far longer still go to a worker with bundles: a stranger cannot delay a step.

Claims: a worker without any bundle counts as fast as it claims. A false claim gains little. A worker that claims to be faster
gets what a worker without a claim gets. One that claims to be slower gets less, and keeps its first lease for CLAIM_SHARE_MAX
of the lease's time at most. This happens once for all newcomers of its network (newcomers.is_believed). From the first bundle
on, only the coordinator's clock counts.

Useless leases: their workers stop and give them back. An open lease is useless if all its groups would be dropped as stale: the
next batch is further from the lease's policy than the schedule allows, and batches only move on. A completion that may continue
under a newer policy, and whose age counts from there, is not useless: the worker keeps its text and continues. Nor is a lease
on the newest policy, because nothing fresher could replace it. Evaluations are not trained on, so they are finished.

A worker names what it works on in its heartbeats. The answer names what is useless, and what has ended and is not redeemable:
others filled its groups, or took them over. A worker that returns a useless lease has abandoned nothing (endings.py). If it
finishes it instead, the bundle is judged as ever, and its groups are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from prime_node.carrier import carrier
from prime_node.coordinator.state import batches, failing, newcomers
from prime_node.coordinator.state.batches import next_step
from prime_node.coordinator.state.operator_orders import pause_of
from prime_node.coordinator.state.records import LeaseEnd, LeaseRecord, State, WorkerRecord
from prime_node.coordinator.state.slots import lowest_open
from prime_protocol import limits
from prime_protocol.visible import number_of


def is_outdated(state: State, policy_version: int) -> bool:
    """Return whether a group that is leased on an older policy than the newest one would be dropped as stale."""
    lag_max = state.rules.admission.lag_max
    if lag_max is None or policy_version >= state.head or not state.rules.ages_from_lease:
        return False
    return next_step(state) - policy_version > lag_max


def is_useless(state: State, lease: LeaseRecord) -> bool:
    """Return whether no batch can take any group of an open lease."""
    return not state.is_evaluation(lease.slots) and is_outdated(state, lease.policy_version)


def cancelled_leases(state: State, worker: str, holding: Iterable[str]) -> tuple[str, ...]:
    """Return those of a worker's leases whose bundles could not be used."""
    return tuple(lease_id for lease_id in holding if _is_over(state, worker, lease_id))


def _is_over(state: State, worker: str, lease_id: str) -> bool:
    lease = state.lease_of(lease_id, worker)
    if lease is None:
        return True
    if lease.worker != worker or lease.end is LeaseEnd.REDEEMED:
        return False
    return is_useless(state, lease) if lease.end is None else not state.is_redeemable(lease)


SILENCE_FACTOR = 5.0
"""Patience for a worker without any bundle, as a multiple of that for a straggler, ..."""
SILENCE_MS_MIN = 10_000
"""... and at least this long."""
CLAIM_MARGIN = 2.0
"""Time that a worker may take, as a multiple of what it claimed, ..."""
CLAIM_SHARE_MAX = 0.4
"""... within this share of its lease's time. An honest worker requests no more than it can do in that: keep
it equal to worker/pace.py::SHARE_OF_LEASE."""
STRAGGLERS_LOOKED_AT_MAX = 64
"""Oldest open leases that are searched for a straggler."""


@carrier(frozen=True, slots=True)
class Grant:
    """The content of a new lease."""

    step: int
    slots: tuple[int, ...]


@carrier(frozen=True, slots=True)
class NothingToLease:
    """The reason why there is nothing to lease now."""

    reason: str
    is_worth_waiting: bool
    """Whether this worker may get a lease later with the policy that it holds."""
    pause_s: float = 0.0
    """Time in which nothing becomes available."""


def choose_slots(
    state: State, worker: WorkerRecord, *, policy_version: int, rollouts_max: int, now_ms: int
) -> Grant | NothingToLease:
    """Return the lowest open slots that the policy may serve, all of one step.

    A group is never split: if `rollouts_max` is less than a group, one group is leased anyway.
    """
    assert worker.active
    assert policy_version in state.published
    rules = state.rules
    if state.draining:
        return NothingToLease("the operator drains the run: no new leases", is_worth_waiting=False)
    if state.is_complete:
        return NothingToLease("the run has all its rollouts", is_worth_waiting=False)
    if worker.delegated_until_ms and worker.delegated_until_ms < now_ms:
        return NothingToLease(
            "the delegation of this machine has expired: authorise it again, and start it again", is_worth_waiting=False
        )
    if pause := pause_of(state):
        return NothingToLease(pause, is_worth_waiting=True)
    groups_max = max(1, min(rollouts_max, limits.LEASE_ROLLOUTS_MAX) // rules.rollouts_per_group)
    places = batches.places_left(state)
    begun_max = groups_max if places is None else min(groups_max, places)
    is_old = is_outdated(state, policy_version)
    again = None
    if worker.left and not is_old:
        again = _find_left(state, worker, policy_version=policy_version, count_max=begun_max)
    is_wasteful = worker.is_wasteful and again is None
    if is_wasteful and (refusal := _make_wait(worker, now_ms)):
        return refusal
    if len(worker.leases) >= rules.leases_per_worker_max:
        return NothingToLease(
            f"you hold {number_of(len(worker.leases), 'lease')}, which is the limit", is_worth_waiting=False
        )
    if len(worker.leases) + len(worker.pending) >= rules.bundles_pending_per_worker_max:
        waiting, held = len(worker.pending), len(worker.leases)
        detail = (
            f"{waiting} of your bundles wait for a validator and you hold {held} leases: together they reach the limit"
        )
        return NothingToLease(detail, is_worth_waiting=waiting > 0)
    if again is not None:
        return again
    count_max = 1 if is_wasteful else groups_max
    budget = newcomers.budget(state, worker)
    if budget is not None:
        if budget.leases == 0:
            reason = (
                "newcomers of your network together hold the limit of one newcomer's leases; it rises with accepted "
                "bundles"
            )
            return NothingToLease(reason, is_worth_waiting=True)
        count_max = min(count_max, budget.groups)
    found = None
    if state.evaluations:
        found = _find_held_out(state, worker, policy_version=policy_version, count_max=count_max)
    if found is None and places != 0 and not is_old:
        found = _find_open(state, worker, policy_version=policy_version, count_max=min(count_max, begun_max))
    if found is None and not is_old:
        found = _find_straggler(state, worker, policy_version=policy_version, count_max=count_max, now_ms=now_ms)
    if found is not None:
        return found
    if policy_version < state.head:
        reason = f"policy {policy_version} has no open work left; policy {state.head} is the newest"
        return NothingToLease(reason, is_worth_waiting=False)
    if places == 0:
        return NothingToLease("the schedule allows no more groups in progress now", is_worth_waiting=True)
    return NothingToLease(
        f"all work for policy {policy_version} is leased; more opens with the next policy or when a lease expires",
        is_worth_waiting=True,
    )


def is_work_left(state: State) -> bool:
    """Return whether a worker with the newest policy could lease an open slot, apart from its own limits."""
    if state.is_ending or state.paused_at_ms:
        return False
    if any(evaluation.open for evaluation in state.evaluations.values()):
        return True
    slots_end = state.rules.admission.slots_end(state.head)
    is_open = any(step.open and step.open[-1] < slots_end for step in state.steps.values())
    return is_open and batches.places_left(state) != 0


def _find_held_out(state: State, worker: WorkerRecord, *, policy_version: int, count_max: int) -> Grant | None:
    evaluation = state.evaluations.get(policy_version)
    if evaluation is None or not evaluation.open:
        return None
    share = -(-evaluation.num_slots // max(1, state.num_active - state.crowd))
    leases = (state.leases[lease_id] for lease_id in worker.leases)
    held = sum(len(lease.slots) for lease in leases if state.step_of(lease) is evaluation)
    count = min(share - held, count_max)
    return Grant(policy_version, lowest_open(evaluation, count)) if count > 0 else None


def _find_left(state: State, worker: WorkerRecord, *, policy_version: int, count_max: int) -> Grant | None:
    """Return a lease that the worker left with, if all of it is open still and within the worker's limits."""
    if policy_version < state.head - state.rules.admission.lag_leased:
        return None
    if (budget := newcomers.budget(state, worker)) is not None:
        count_max = min(count_max, budget.groups if budget.leases else 0)
    for lease in (worker.ended_lease(lease_id) for lease_id in worker.left):
        step = None if lease is None else state.steps.get(lease.step)
        if lease is None or step is None or lease.policy_version != policy_version or state.is_evaluation(lease.slots):
            continue
        is_open = not any(slot in step.held or slot in step.accepted or slot in state.failing for slot in lease.slots)
        share = fair_share(state) - slots_held(state, worker, lease.step)
        if is_open and len(lease.slots) <= min(count_max, share):
            return Grant(lease.step, lease.slots)
    return None


def _find_open(state: State, worker: WorkerRecord, *, policy_version: int, count_max: int) -> Grant | None:
    admission = state.rules.admission
    if policy_version < state.head - admission.lag_leased:  # fetching a newer policy always gives fresher work
        return None
    slots_end, share = admission.slots_end(policy_version), fair_share(state)
    is_slow = state.rules.slow_factor is not None and _is_slow(state, worker, state.rules.slow_factor)
    last: Grant | None = None
    for number, step in state.steps.items():
        if not step.open or step.open[-1] >= slots_end:
            continue
        held = slots_held(state, worker, number) if worker.leases else 0
        room = min(share - held, count_max)
        if room <= 0:
            continue
        fitting = _fitting(state, worker, number) if is_slow else room
        slots = lowest_open(step, room if fitting >= room else max(1, fitting))
        if slots[-1] >= slots_end:
            slots = tuple(slot for slot in slots if slot < slots_end)
        last = Grant(number, failing.alone(state, slots) if state.failing else slots)
        if fitting >= 1:
            break
    return last


def _is_slow(state: State, worker: WorkerRecord, factor: float) -> bool:
    return state.num_active > 1 and state.step_ms > 0 and _speed_ms(worker) > factor * state.rollout_ms > 0


def _speed_ms(worker: WorkerRecord) -> float:
    """Return the time per rollout, measured or else claimed; 0 if unknown."""
    return worker.rollout_ms or (0.0 if worker.claimed is None else float(worker.claimed.rollout_ms))


def _fitting(state: State, worker: WorkerRecord, number: int) -> int:
    """Return how many more groups a worker can finish before the trainer needs them, by its time per rollout."""
    group_ms = _speed_ms(worker) * state.rules.rollouts_per_group
    held = sum(len(state.leases[lease_id].slots) for lease_id in worker.leases)
    return int((number - state.head + 1) * state.step_ms / group_ms) - held


def _find_straggler(
    state: State, worker: WorkerRecord, *, policy_version: int, count_max: int, now_ms: int
) -> Grant | None:
    slots_end = state.rules.admission.slots_end(policy_version)
    if state.rollout_ms == 0:
        return None
    mine = {*worker.leases, *(state.bundles[bundle].lease.lease_id for bundle in worker.pending)}
    for lease in islice(state.leases.values(), STRAGGLERS_LOOKED_AT_MAX):
        step = state.steps.get(lease.step)
        if lease.worker == worker.worker or step is None or state.is_evaluation(lease.slots):
            continue
        copies_max = _copies_max(state, lease, worker, now_ms)
        if copies_max == 1:
            continue
        slots = tuple(
            slot
            for slot in lease.slots
            if slot < slots_end
            and slot not in step.accepted
            and len(step.held[slot]) < copies_max
            and mine.isdisjoint(step.held[slot])
        )
        if slots:
            return Grant(lease.step, slots[:count_max])
    return None


def _copies_max(state: State, lease: LeaseRecord, asker: WorkerRecord, now_ms: int) -> int:
    """Return how many workers may hold the slots of a lease now, its own worker included."""
    late_ms, usual_ms = _time_taken(state, lease, now_ms)
    patience_ms = state.rules.straggler_factor * usual_ms
    if late_ms <= patience_ms:
        return 1
    holder = state.workers[lease.worker]
    silence_ms = max(SILENCE_FACTOR * patience_ms, SILENCE_MS_MIN, _claimed_ms(state, holder, lease))
    is_silent = not holder.accepted and late_ms > silence_ms
    return max(state.rules.leases_per_slot_max, 2 if is_silent and asker.accepted else 1)


def _claimed_ms(state: State, holder: WorkerRecord, lease: LeaseRecord) -> float:
    """Return how long an unmeasured worker may take for its first lease, by its own claim."""
    if holder.claimed is None or holder.rollout_ms or not newcomers.is_believed(state, holder):
        return 0.0
    claimed_ms = CLAIM_MARGIN * holder.claimed.rollout_ms * len(lease.slots) * state.rules.rollouts_per_group
    return min(claimed_ms, CLAIM_SHARE_MAX * state.rules.lease_ms)


def _time_taken(state: State, lease: LeaseRecord, now_ms: int) -> tuple[float, float]:
    """Return how long a worker has been without a bundle while it held a lease, and how long all its leases usually take.

    A worker may generate its leases side by side: then each of them takes as long as all together.
    """
    worker = state.workers[lease.worker]
    num_rollouts = sum(len(state.leases[each].slots) for each in worker.leases) * state.rules.rollouts_per_group
    begun_ms = max(lease.issued_at_ms, worker.arrived_at_ms)
    return now_ms - begun_ms, state.rollout_ms * num_rollouts


def _make_wait(worker: WorkerRecord, now_ms: int) -> NothingToLease | None:
    """Return why a worker with abandoned leases has to wait: its pause is not over, or it holds a lease."""
    pause_s = (worker.pause_until_ms - now_ms) / 1_000
    if pause_s > 0:
        reason = f"you abandoned your last {worker.wasted} leases; wait {pause_s:.0f} s"
        return NothingToLease(reason, is_worth_waiting=False, pause_s=pause_s)
    if worker.leases:
        return NothingToLease(
            "you abandoned your last leases: you may hold one lease of one group at a time", is_worth_waiting=False
        )
    return None


def fair_share(state: State) -> int:
    """Return the number of slots of one step that one worker may hold at once."""
    return -(-state.rules.groups_per_step // max(1, state.num_active - state.crowd))


def slots_held(state: State, worker: WorkerRecord, number: int) -> int:
    """Return the number of slots of a step that a worker has leased and not uploaded yet."""
    held = 0
    for lease_id in worker.leases:
        lease = state.leases[lease_id]
        if lease.step == number and not state.is_evaluation(lease.slots):
            held += len(lease.slots)
    return held


def expired_leases(state: State, now_ms: int) -> tuple[str, ...]:
    """Return the open leases whose time is up. All leases are equally long, so the oldest ones are the first ones."""
    expired = []
    for lease_id, lease in state.leases.items():
        if lease.expires_at_ms > now_ms:
            break
        expired.append(lease_id)
    return tuple(expired)
