"""What the run still needs: the oldest policy and the oldest step, as functions of the state."""

from __future__ import annotations

from prime_node.coordinator.state.records import State
from prime_protocol.schedule import Selection


def forgettable_step(state: State, durable_step: int) -> int:
    """Return the step before which batches may be forgotten, for a trainer that would resume at `durable_step`."""
    number = state.durable_step
    while number < durable_step and state.is_given(number):
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
