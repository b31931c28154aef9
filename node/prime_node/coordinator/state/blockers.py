"""Causes for which a run waits, as text for its operator and as a function of the state."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from prime_node.coordinator.state import failing
from prime_node.coordinator.state.batches import choose_batch
from prime_node.coordinator.state.operator_orders import pause_of
from prime_node.coordinator.state.records import LeaseRecord, State
from prime_protocol.schedule import Selection
from prime_protocol.visible import number_of

UNVERIFIABLE_SHOWN = 3
"""Unverifiable bundles in a row after which the watchdog notifies the operator."""


@dataclass(slots=True)
class Blockers:
    """Cause for which the run waits."""

    state: State
    environment_fault: str = ""
    """Error of the last attempt to make a problem into a prompt; empty if it succeeded."""

    def reasons(self) -> list[str]:
        """Describe what the run waits for, the operator's own tasks first."""
        fault = [f"the operator: {self.environment_fault}"] if self.environment_fault else []
        return [*fault, *waits_for(self.state)]


def waits_for(state: State) -> list[str]:
    """Describe what the run waits for. Empty only when the run is over."""
    rules = state.rules
    if state.head < 0:
        return ["the trainer: policy 0 is not published"]
    if state.head >= rules.max_steps:
        return []
    waits = [f"the operator: {pause}, so no new work is leased"] if (pause := pause_of(state)) else []
    if state.unverifiable >= UNVERIFIABLE_SHOWN:
        waits.append(
            f"the operator: {state.unverifiable} bundles in a row could not be checked: {state.unverifiable_detail}"
        )
    if state.is_given(state.head) or choose_batch(state) is not None:
        return [*waits, f"the trainer: it has the rollouts of step {state.head}"]
    if state.draining:
        waits.append("the operator: the run is draining, so no new work is leased")
    # In order, only the current step delays the trainer. Otherwise any group helps, and the message names the oldest.
    wanted = [state.head] if rules.selection is Selection.IN_ORDER else list(state.steps)
    steps = {number: state.steps[number] for number in wanted if number in state.steps}
    num_open = sum(len(step.open) for step in steps.values())
    leased = [lease for lease in state.leases.values() if _is_of(state, lease, steps)]
    pending = sum(_is_of(state, bundle.lease, steps) for bundle in state.bundles.values())
    what = f"step {state.head}" if len(steps) == 1 else f"steps {min(steps, default=0)} to {max(steps, default=0)}"
    if num_open:
        who = "workers: none is active" if state.num_active == 0 else "workers to request leases"
        waits.append(f"{who}; {number_of(num_open, 'group')} of {what} {'is' if num_open == 1 else 'are'} open")
    waits += failing.waits(state, steps)
    if leased:
        # Name the holders of the oldest leases first: they are the likely cause of the wait.
        names = ", ".join(dict.fromkeys(state.workers[lease.worker].name for lease in leased[:5]))
        waits.append(f"rollouts of {what} from {names}")
    if pending:
        waits.append(f"validators: {number_of(pending, 'bundle')} of {what}")
    return waits


def _is_of(state: State, lease: LeaseRecord, steps: Container[int]) -> bool:
    return lease.step in steps and not state.is_evaluation(lease.slots)
