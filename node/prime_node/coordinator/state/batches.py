"""The batches: which groups the next one takes, and the trainer's and the operator's events.

`choose_batch` decides, as a function of the state. The batch is fixed when the trainer receives it: the event names its groups.
With in-order selection, a batch is the next slots by number, and it waits for each of them. Otherwise the batch is chosen among
the accepted groups. Stale groups are dropped, waited for, masked or kept, as the run's policy says.
Further events: durable steps, publications, draining. What the run still needs follows from the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

from prime_node.coordinator.state import evaluations, slots
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import (
    BATCH_CHANGED,
    LEASE_CHANGED,
    LEASE_CHANGED_FOR_ALL,
    BundleForgotten,
    Effect,
)
from prime_node.coordinator.state.records import LeaseRecord, Publication, State, WorkerRecord
from prime_node.coordinator.state.slot_records import StepSlots
from prime_protocol.schedule import Selection, StalePolicy


class Ready(NamedTuple):
    """An accepted group that is in no batch yet."""

    slot: int
    policy_version: int
    """Policy from which its staleness is counted."""
    order: int
    """Position among all groups in the order of acceptance."""


def stale(ready: Iterable[Ready], *, step: int, lag_max: int) -> tuple[int, ...]:
    """Return the slots of groups that are too old for `step`, ascending."""
    return tuple(sorted(group.slot for group in ready if step - group.policy_version > lag_max))


def is_overdue(begun_versions: Iterable[int], *, step: int, lag_max: int) -> bool:
    """Return whether a group that is begun and not accepted would be too old for the batch after `step` (StalePolicy.WAIT)."""
    return any(step - version >= lag_max for version in begun_versions)


def choose_ready(
    ready: Sequence[Ready],
    count: int,
    *,
    selection: Selection,
    slots_end: int,
    begun_versions: Iterable[int] = (),
) -> tuple[int, ...] | None:
    """Return the slots of a batch of `count` groups, ascending; None if it must wait.

    `slots_end` bounds Selection.WINDOW. `begun_versions` holds the policy of each group that is begun and not accepted:
    Selection.VERSION_FIFO waits for those that come before a group that it would take.
    """
    if selection is Selection.WINDOW:
        ready = [group for group in ready if group.slot < slots_end]
    if len(ready) < count:
        return None
    chosen = sorted(ready, key=_RANKS[selection])[:count]  # mostly sorted already, which makes sorting fast
    if selection is Selection.VERSION_FIFO and min(begun_versions, default=inf) < chosen[-1].policy_version:
        return None
    return tuple(sorted(group.slot for group in chosen))


_RANKS: Mapping[Selection, Callable[[Ready], Any]] = {
    Selection.READY_FIRST: attrgetter("order"),
    Selection.WINDOW: attrgetter("order"),
    Selection.LOWEST_SLOT_FIRST: attrgetter("slot"),
    Selection.LOWEST_VERSION_FIRST: attrgetter("policy_version", "order"),
    Selection.VERSION_FIFO: attrgetter("policy_version", "slot"),
    Selection.FRESHEST_FIRST: lambda group: (-group.policy_version, group.slot),
}
"""Training order of ready groups, by selection."""


CHOICE_RULES = 1
"""Version of the rules by which `choose_batch` and `stale_slots` choose. A change of what they choose raises it: `coordinator
replay` then accuses no coordinator that chose by the rules of its own release."""


def forgettable_step(state: State, durable_step: int) -> int:
    """Return the step before which batches may be forgotten, for a trainer that would resume at `durable_step`.

    The batch of a policy that is not published is never forgotten: its manifest must name it.
    """
    number = state.durable_step
    while number < min(durable_step, state.head) and state.is_given(number):
        number += 1
    return number


def oldest_policy_needed(state: State) -> int:
    """Return the oldest policy that a lease names or may name, or that a validator needs."""
    oldest = min([max(0, state.head - state.rules.admission.lag_leased), *state.evaluations])
    if state.rules.selection is Selection.IN_ORDER:  # nothing older is in the window
        return oldest
    versions = [lease.policy_version for lease in state.leases.values()]
    versions += [pending.lease.policy_version for pending in state.bundles.values()]
    return min([oldest, *versions])


def next_step(state: State) -> int:
    """Return the step whose next batch is not fixed yet."""
    step = state.durable_step
    while state.is_given(step):
        step += 1
    return step


def stale_slots(state: State, step: int) -> tuple[int, ...]:
    """Return the accepted groups that are too old for `step`. They are dropped before its batch is chosen."""
    lag_max = state.rules.admission.lag_max
    return () if lag_max is None else stale(_ready(state), step=step, lag_max=lag_max)


def stored_of(state: State, slot: int) -> set[str]:
    """Return the digests of the stored bytes that a slot's group needs: its bundle, and a validator's logprobs of it.

    There are none if no accepted group waits in the slot for a batch.
    """
    step = state.steps.get(slot // state.rules.groups_per_step)
    if step is None or slot in step.taken or slot not in step.accepted:
        return set()
    return {step.accepted[slot].bundle, step.accepted[slot].logprobs} - {""}


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
    if state.num_ready < count or is_too_far_ahead(state, step):
        return None
    begun = list(_begun_versions(state)) if rules.waits_for_begun else []
    if rules.stale is StalePolicy.WAIT:
        assert rules.lag_max is not None
        if is_overdue(begun, step=step, lag_max=rules.lag_max):
            return None
    if (lag_max := rules.admission.lag_max) is not None:  # what is too old is not waited for
        begun = [version for version in begun if step - version <= lag_max]
    slots_end = _window_end(state) if rules.selection is Selection.WINDOW else 0
    return choose_ready(
        list(_ready(state)), count, selection=rules.selection, slots_end=slots_end, begun_versions=begun
    )


def is_too_far_ahead(state: State, step: int) -> bool:
    """Return whether `step`, the first one that is not given completely, is beyond what may be given or begun."""
    bound = state.rules.max_run_ahead
    return bound is not None and step - state.head > bound


def places_left(state: State) -> int | None:
    """Return how many groups may be begun now; None: no such bound."""
    rules = state.rules
    if rules.max_run_ahead is not None and is_too_far_ahead(state, next_step(state)):
        return 0
    if rules.inflight_max is None:
        return None
    return max(
        0, rules.inflight_max - sum(len(step.held.keys() - step.accepted.keys()) for step in state.steps.values())
    )


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


def may_be_ready(state: State, step: int) -> bool:
    """Return whether a group accepted for `step` may have completed the next batch. Cheap; `choose_batch` decides."""
    rules = state.rules
    return state.is_ready(step) if rules.is_batched_by_step else state.num_ready >= rules.batch_groups


def mean(before: float, value: float, *, weight: float) -> float:
    """Return the EWMA of `before` and `value`; 0 = unset."""
    return before + weight * (value - before) if before else value


def measure_speed(state: State, worker: WorkerRecord, lease: LeaseRecord, num_rollouts: int, at_ms: int) -> None:
    """Update a worker's speed: the time from when it could begin a lease until its bundle arrived."""
    took_ms = max(1, at_ms - max(lease.issued_at_ms, worker.arrived_at_ms)) / num_rollouts
    worker.rollout_ms = mean(worker.rollout_ms, took_ms, weight=0.3)
    state.rollout_ms = mean(state.rollout_ms, took_ms, weight=0.05)
    worker.arrived_at_ms = at_ms


def _batch_fixed(state: State, event: ev.BatchFixed, at_ms: int) -> list[Effect]:
    assert len(event.slots) == state.rules.batch_groups
    assert not state.is_given(event.step)
    slots.take_slots(state, event.slots, event.step)
    state.batches.setdefault(event.step, []).append(event.slots)
    return []


def _groups_dropped(state: State, event: ev.GroupsDropped | ev.GroupsLost, at_ms: int) -> list[Effect]:
    _drop(state, event.slots)
    return [LEASE_CHANGED]


def _drop(state: State, dropped: Sequence[int]) -> None:
    for slot in dropped:
        slots.drop(state, state.steps[slot // state.rules.groups_per_step], slot)


def _groups_rated(state: State, event: ev.GroupsRated, at_ms: int) -> list[Effect]:
    curriculum, rules = state.curriculum, state.rules
    curriculum.forget_before(state.first_step, groups_per_step=rules.groups_per_step)
    for rating in event.ratings:
        curriculum.rate(rating, step=event.step, num_rollouts=rules.rollouts_per_group)
    filtered = [rating.slot for rating in event.ratings if rating.filtered is not None]
    _drop(state, filtered)
    return [LEASE_CHANGED] if filtered else []


def _examples_lifted(state: State, event: ev.ExamplesLifted, at_ms: int) -> list[Effect]:
    state.curriculum.lift(event.examples)
    return []


def _trainer_durable(state: State, event: ev.TrainerDurable, at_ms: int) -> list[Effect]:
    assert all(state.is_given(number) for number in range(state.durable_step, event.step))
    for number in range(state.durable_step, event.step):
        del state.batches[number]
    state.durable_step = event.step
    done = [number for number, step in state.steps.items() if step.fixed and max(step.taken.values()) < event.step]
    effects: list[Effect] = []
    for number in done:
        kept = state.bundles.keys() | set(state.evidence)
        effects += [BundleForgotten(bundle) for bundle in state.steps.pop(number).bundles if bundle not in kept]
    state.first_step = next(iter(state.steps), state.last_step + 1)
    return effects


def _manifest_published(state: State, event: ev.ManifestPublished, at_ms: int) -> list[Effect]:
    assert event.policy_version == state.head + 1
    if state.head >= 0:
        state.step_ms = mean(state.step_ms, max(1, at_ms - state.published_at_ms), weight=0.3)
    first = state.last_step + 1
    state.head, state.published_at_ms = event.policy_version, at_ms
    state.published[event.policy_version] = Publication(event.digest, event.routes)
    state.bytes_published += sum(route.sent_bytes for route in event.routes)
    size = state.rules.groups_per_step
    for number in range(first, state.last_step + 1):
        state.steps[number] = StepSlots(open=list(range((number + 1) * size - 1, number * size - 1, -1)))
    held_back = [BATCH_CHANGED] if state.rules.max_run_ahead is not None else []
    return [LEASE_CHANGED_FOR_ALL, *held_back, *evaluations.retire(state)]


def _encodings_forgotten(state: State, event: ev.EncodingsForgotten, at_ms: int) -> list[Effect]:
    forgotten = set(event.encodings)
    for version in {version for version, _ in forgotten}:
        known = state.published[version]
        routes = tuple(route for route in known.routes if (version, route.base_version) not in forgotten)
        if routes:
            state.published[version] = replace(known, routes=routes)
        else:
            del state.published[version]
    return []


def _drain_set(state: State, event: ev.DrainSet, at_ms: int) -> list[Effect]:
    state.draining = True
    return [LEASE_CHANGED_FOR_ALL]


HANDLERS: Mapping[type, Callable[[State, Any, int], list[Effect]]] = {
    ev.BatchFixed: _batch_fixed,
    ev.GroupsDropped: _groups_dropped,
    ev.GroupsLost: _groups_dropped,
    ev.GroupsRated: _groups_rated,
    ev.ExamplesLifted: _examples_lifted,
    ev.TrainerDurable: _trainer_durable,
    ev.ManifestPublished: _manifest_published,
    ev.EncodingsForgotten: _encodings_forgotten,
    ev.DrainSet: _drain_set,
    **evaluations.HANDLERS,
}
