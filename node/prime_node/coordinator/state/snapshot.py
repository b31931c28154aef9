"""Conversion of the state to one JSON text and back."""

from __future__ import annotations

from pydantic import TypeAdapter

from prime_node.coordinator.state.records import State

_STATE: TypeAdapter[State] = TypeAdapter(State)


def state_to_json(state: State) -> str:
    """Return the state as JSON."""
    return _STATE.dump_json(state).decode()


def state_from_json(payload: str) -> State:
    """Return the state of our own snapshot. A pydantic ValidationError means that another release wrote it."""
    return _STATE.validate_json(payload)
