"""The operator's events that pause the run and limit who joins. A paused run leases nothing new, and continues where it stopped.

Leases that are out may still be redeemed, and bundles are judged. So nothing is lost, and a batch that is full is still trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from prime_node.coordinator.state import events as ev
from prime_node.coordinator.state.effects import LEASE_CHANGED_FOR_ALL, Effect
from prime_node.coordinator.state.records import State


def pause_of(state: State) -> str:
    """Return why a run is paused, as workers see it; empty if it is not. Example: "the operator has paused the run: moving"."""
    if not state.paused_at_ms:
        return ""
    reason = f": {state.pause_reason}" if state.pause_reason else ""
    return f"the operator has paused the run{reason}"


def _run_paused(state: State, event: ev.RunPaused, at_ms: int) -> list[Effect]:
    state.paused_at_ms = state.paused_at_ms or at_ms
    state.pause_reason = event.reason
    return [LEASE_CHANGED_FOR_ALL]


def _run_resumed(state: State, event: ev.RunResumed, at_ms: int) -> list[Effect]:
    assert state.paused_at_ms
    # The pause is no part of a step's time.
    state.published_at_ms += max(0, at_ms - max(state.paused_at_ms, state.published_at_ms))
    state.paused_at_ms, state.pause_reason = 0, ""
    return [LEASE_CHANGED_FOR_ALL]


def _joining_limited(state: State, event: ev.JoiningLimited, at_ms: int) -> list[Effect]:
    state.joining = event.limits
    return []


HANDLERS: Mapping[type, Callable[[State, Any, int], list[Effect]]] = {
    ev.RunPaused: _run_paused,
    ev.RunResumed: _run_resumed,
    ev.JoiningLimited: _joining_limited,
}
