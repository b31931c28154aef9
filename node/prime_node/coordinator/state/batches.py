"""The trainer's and the operator's events: batches, durable steps, publications, draining.

A batch is fixed when the trainer receives it. batching.py chose its groups before, and the event names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prime_node.coordinator.state import evaluations, slots
from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import LEASE_CHANGED, LEASE_CHANGED_FOR_ALL, BundleForgotten, Effect
from prime_node.coordinator.state.records import LeaseRecord, Publication, State, WorkerRecord
from prime_node.coordinator.state.slot_records import StepSlots


def may_be_ready(state: State, step: int) -> bool:
    """Return whether a group accepted for `step` may have completed the next batch. Cheap; batching.py decides."""
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


def _groups_dropped(state: State, event: ev.GroupsDropped, at_ms: int) -> list[Effect]:
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
    return [LEASE_CHANGED_FOR_ALL, *evaluations.retire(state)]


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
    ev.GroupsRated: _groups_rated,
    ev.ExamplesLifted: _examples_lifted,
    ev.TrainerDurable: _trainer_durable,
    ev.ManifestPublished: _manifest_published,
    ev.EncodingsForgotten: _encodings_forgotten,
    ev.DrainSet: _drain_set,
    **evaluations.HANDLERS,
}
