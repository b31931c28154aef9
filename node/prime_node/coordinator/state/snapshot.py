"""The state as one JSON text, and back. Older releases' texts are read too."""

from __future__ import annotations

from pydantic import TypeAdapter

from prime_node.coordinator.state import newcomers
from prime_node.coordinator.state.records import State

_STATE: TypeAdapter[State] = TypeAdapter(State)
_NEWER_FIELD = '"num_ready":'
"""A snapshot without it was written before there were schedules. (Inside a JSON string the quotes would be escaped.)"""

_NETWORK_SUMS = '"by_away":'
"""A snapshot without it was written while networks were lists of keys."""


def to_json(state: State) -> str:
    return _STATE.dump_json(state).decode()


def from_json(payload: str) -> State:
    """A snapshot of our own. A pydantic ValidationError means that another release wrote it."""
    state = _STATE.validate_json(payload)
    if _NEWER_FIELD not in payload:
        _complete(state)
    if _NETWORK_SUMS not in payload:
        newcomers.rebuild(state)
    return state


def _complete(state: State) -> None:
    """What an older snapshot did not say: batches were whole steps, and a slot was held by one lease."""
    state.durable_step = state.first_step
    for number, step in state.steps.items():
        step.open.sort(reverse=True)
        if step.fixed:
            step.taken = dict.fromkeys(step.accepted, number)
            state.batches[number] = [tuple(sorted(step.accepted))]
        else:
            state.num_ready += len(step.accepted)
    for lease in [*state.leases.values(), *(pending.lease for pending in state.bundles.values())]:
        for slot in lease.slots:
            state.steps[lease.step].held[slot] = (lease.lease_id,)
