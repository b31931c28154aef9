"""Moves of slots: each slot of the window is open, held, or accepted, and only these functions move it.

A slot is open exactly if no lease holds it and no accepted group fills it. An open lease holds it, or the bundle that arrived
for a lease. Several leases may hold a straggler's slots; the first accepted bundle fills them. When an accepted group is
dropped, its slot is open again under its old number.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import neg

from prime_node.coordinator.state import evaluations
from prime_node.coordinator.state.effects import BATCH_CHANGED, LEASE_CHANGED, Effect
from prime_node.coordinator.state.records import LeaseRecord, State
from prime_node.coordinator.state.slot_records import AcceptedGroup, Evaluation, StepSlots

_FIRST_OF_ONE = (0,)
"""Attempts of nearly every lease of one slot, which is its first lease; shared to save memory."""


def attempt(step: StepSlots, slots: tuple[int, ...]) -> tuple[int, ...]:
    """Count one more lease of each slot. Return how many each had before."""
    before = []
    for slot in slots:
        number = step.attempts.get(slot, 0)
        step.attempts[slot] = number + 1
        before.append(number)
    return _FIRST_OF_ONE if before == [0] else tuple(before)


def hold(step: StepSlots, lease: LeaseRecord) -> None:
    """Let a lease hold its slots, which are open or held by others."""
    mine = (lease.lease_id,)
    for slot in lease.slots:
        if slot in step.held:
            step.held[slot] += mine
        else:
            _close(step.open, slot)
            step.held[slot] = mine


def release_slots(state: State, step: StepSlots | None, lease: LeaseRecord) -> list[Effect]:
    """Release the slots of a lease or its bundle. Slots that nothing holds or fills are open again."""
    if step is None:  # others filled its slots, and they are trained and forgotten
        return []
    reopened = False
    for slot in lease.slots:
        holders = step.held[slot]
        if len(holders) > 1:
            step.held[slot] = tuple([holder for holder in holders if holder != lease.lease_id])
            continue
        del step.held[slot]
        if slot not in step.accepted and (not isinstance(step, Evaluation) or evaluations.is_asked_again(step, slot)):
            insort(step.open, slot, key=neg)
            reopened = True
    ended = evaluations.settle_evaluation(state, lease.step) if isinstance(step, Evaluation) else []
    waiting = [BATCH_CHANGED] if state.rules.waits_for_begun else []
    return [LEASE_CHANGED, *waiting, *ended] if reopened else [*waiting, *ended]


def fill(state: State, step: StepSlots, slot: int, group: AcceptedGroup) -> None:
    """Put an accepted group into its slot, which a lease holds, unless another group is there already."""
    if slot in step.accepted:
        return
    assert slot in step.held
    step.accepted[slot] = group
    if state.failing:
        state.failing.pop(slot, None)
    if not isinstance(step, Evaluation):
        state.num_ready += 1
        state.num_accepted_groups += 1


def take_slots(state: State, slots: tuple[int, ...], for_step: int) -> None:
    """Add accepted groups to a batch."""
    size = state.rules.groups_per_step
    for slot in slots:
        step = state.steps[slot // size]
        assert slot in step.accepted
        assert slot not in step.taken
        step.taken[slot] = for_step
        step.fixed = len(step.taken) == size
    state.num_ready -= len(slots)


def drop(state: State, step: StepSlots, slot: int) -> None:
    """Drop an accepted group that no batch has taken."""
    assert slot not in step.taken
    del step.accepted[slot]
    if not isinstance(step, Evaluation):
        state.num_ready -= 1
        state.num_dropped_groups += 1
    elif step.retired:
        return
    if slot not in step.held:
        insort(step.open, slot, key=neg)


def room(state: State) -> list[Effect]:
    """Return LEASE_CHANGED if there is an open slot, because some worker's share may have grown."""
    for step in reversed(state.steps.values()):  # the newest is leased last
        if step.open:
            return [LEASE_CHANGED]
    return [LEASE_CHANGED] if any(one.open for one in state.evaluations.values()) else []


def lowest_open(step: StepSlots, count: int) -> tuple[int, ...]:
    """Return at most `count` open slots, ascending."""
    return tuple(step.open[: -count - 1 : -1])


def _close(descending: list[int], slot: int) -> None:
    if descending and descending[-1] == slot:  # nearly always: the lowest slot is leased first
        descending.pop()
        return
    place = bisect_left(descending, -slot, key=neg)
    assert descending[place : place + 1] == [slot], f"slot {slot} is neither open nor held"
    del descending[place]
