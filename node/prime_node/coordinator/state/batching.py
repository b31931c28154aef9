"""Which groups the trainer's next batch takes, as a function of the state. This file decides; `state.tick` applies the decision.

With in-order selection, a batch is the next slots by number, and it waits for each of them. Otherwise the batch is chosen among
the accepted groups. Stale groups are dropped, waited for, masked or kept, as the run's policy says (training_data/selection.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from prime_node.coordinator.state.records import LeaseRecord, State
from prime_node.training_data.selection import Ready, choose_in_time, choose_ready, stale
from prime_protocol.schedule import Selection, StalePolicy


def next_step(state: State) -> int:
    """Return the step whose next batch is not fixed yet."""
    step = state.durable_step
    while state.is_given(step):
        step += 1
    return step


def stale_slots(state: State, step: int) -> tuple[int, ...]:
    """Return the accepted groups that are too old for `step`. They are dropped before its batch is chosen.

    Under StalePolicy.WAIT there are some only if more groups were leased late, on an old policy, than a step can take.
    """
    lag_max = state.rules.admission.lag_max
    return () if lag_max is None else stale(_ready(state), step=step, lag_max=lag_max)


def choose_batch(state: State) -> tuple[int, ...] | None:
    """Return the slots of the next batch, ascending; None if the batch has to wait."""
    rules = state.rules
    step, count = next_step(state), rules.batch_groups
    if step >= rules.max_steps:
        return None
    num_given = len(state.batches.get(step, ()))
    if rules.selection is Selection.IN_ORDER:
        first = step * rules.groups_per_step + num_given * count
        accepted = state.steps[step].accepted if step in state.steps else {}
        return tuple(range(first, first + count)) if all(s in accepted for s in range(first, first + count)) else None
    if state.num_ready < count:
        return None
    ready = list(_ready(state))
    if rules.stale is StalePolicy.WAIT:
        assert rules.lag_max is not None
        return choose_in_time(
            ready,
            _begun_versions(state),
            count,
            step=step,
            capacity_left=count * (rules.batches_per_step - 1 - num_given),
            groups_per_step=rules.groups_per_step,
            lag_max=rules.lag_max,
            selection=rules.selection,
        )
    slots_end = _window_end(state) if rules.selection is Selection.WINDOW else 0
    return choose_ready(ready, count, selection=rules.selection, slots_end=slots_end)


def _ready(state: State) -> Iterator[Ready]:
    staleness_from = state.rules.staleness_from
    for step in state.steps.values():
        if not step.fixed:
            for slot, group in step.accepted.items():
                if slot not in step.taken:
                    yield Ready(slot, group.counted_from(staleness_from), group.order)


def _begun_versions(state: State) -> Iterator[int]:
    """Yield, for each held slot that is not filled, the oldest policy that a worker uses on it."""
    oldest: dict[int, int] = {}
    for lease in _holders(state):
        step = None if state.is_evaluation(lease.slots) else state.steps.get(lease.step)
        for slot in lease.slots if step is not None else ():
            if step is not None and slot not in step.accepted:
                oldest[slot] = min(lease.policy_version, oldest.get(slot, lease.policy_version))
    return iter(oldest.values())


def _holders(state: State) -> Iterator[LeaseRecord]:
    yield from state.leases.values()
    yield from (pending.lease for pending in state.bundles.values())


def _window_end(state: State) -> int:
    """Return an upper bound: the lowest `window_groups` untrained slots are below it.

    A window that counted trained slots too could hold less than a batch, and wait forever.
    """
    size = state.rules.groups_per_step
    untaken = (
        slot
        for number, step in state.steps.items()
        if not step.fixed
        for slot in range(number * size, (number + 1) * size)
        if slot not in step.taken
    )
    return max(islice(untaken, state.rules.window_groups), default=0) + 1
