"""The admission rule of asynchronous training: which policy may serve which group and which step. All components call it.

At step n the trainer holds policy n, consumes R groups and produces policy n + 1. Slot m, the m-th group ever
requested, belongs to step m // R. With the staleness allowance eta (k, if it is a whole number), slot m may be begun on

    policy v    if and only if    v >= max(0, ceil((m + 1) / R - 1 - eta))    which is    m < v R + floor(R (1 + eta))

For whole eta and batches in slot order this means: a rollout tagged n may come from any policy v with 0 <= n - v <= k.
k = 0 is on-policy; k = 2 hides the broadcast (INTELLECT-2, arXiv 2505.07291, section 2.1.2). Other selections and
fractions of a step give the modes of the other frameworks (schedule.py, docs/scheduler.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StepFault(StrEnum):
    """Reason why a rollout does not belong to its step."""

    STALE = "stale"
    """Policy more than async_level versions behind, or step already trained."""
    FUTURE = "future"
    """Policy that does not exist yet or is newer than its step, or step that cannot have been leased yet."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Rule with a run's numbers. Example: Admission(groups_per_step=32, slots_ahead=96, is_in_order=True) is k = 2."""

    groups_per_step: int
    """R, the number of groups that one step trains on."""
    slots_ahead: int
    """floor(R (1 + eta)), at least R."""
    is_in_order: bool
    """Whether step n trains slots nR to (n + 1)R - 1. Otherwise a slot may be trained later or earlier than its own step."""
    lag_max: int | None = None
    """Maximum lag of a trained group behind the step that trains it. None: no such bound."""

    @property
    def lag_leased(self) -> int:
        """ceil(eta): how many policies behind the newest one a worker may be and still get a lease."""
        return -(-self.slots_ahead // self.groups_per_step) - 1

    def slots_end(self, policy_version: int) -> int:
        """Return the end of the slots that may be begun on a policy (exclusive)."""
        return policy_version * self.groups_per_step + self.slots_ahead

    def admits_slot(self, slot: int, policy_version: int) -> bool:
        """Return whether a slot may be begun on a policy."""
        return policy_version >= 0 and slot < self.slots_end(policy_version)

    def admits_step(self, step: int, policy_version: int) -> bool:
        """Return whether some slot of a step may be begun on a policy."""
        return self.admits_slot(step * self.groups_per_step, policy_version) and not (
            self.is_in_order and policy_version > step
        )

    def last_step(self, policy_version: int) -> int:
        """Return the last step with a slot that may be begun on a policy."""
        return (self.slots_end(policy_version) - 1) // self.groups_per_step

    def check(self, step: int, policy_version: int, *, current_step: int) -> StepFault | None:
        """Judge a rollout's tags on arrival, while the trainer works at `current_step`. None means admissible.

        In order, `check_step` below decides. Otherwise a past step may still wait for its slot; staleness is judged
        when a batch would take it.
        """
        if self.is_in_order:
            return check_step(step, policy_version, async_level=self.lag_leased, current_step=current_step)
        if not 0 <= policy_version <= current_step or step > self.last_step(policy_version):
            return StepFault.FUTURE
        return None

    def check_trained(self, step: int, policy_version: int) -> StepFault | None:
        """Judge a group in the batch of `step`, by the policy from which its staleness counts."""
        if not 0 <= policy_version <= step:
            return StepFault.FUTURE
        lag_max = self.lag_leased if self.is_in_order else step
        if self.lag_max is not None:
            lag_max = min(lag_max, self.lag_max)
        return StepFault.STALE if step - policy_version > lag_max else None


def lag(step: int, policy_version: int) -> int:
    """Return how many policies a rollout is behind the step that trains it."""
    return step - policy_version


def newest_step(policy_version: int, async_level: int) -> int:
    """Return the last step that a rollout of `policy_version` may be tagged with."""
    return policy_version + async_level


def check_step(step: int, policy_version: int, *, async_level: int, current_step: int) -> StepFault | None:
    """Judge a rollout's tags while the trainer works at `current_step`. None means admissible.

    A step below `current_step` has been trained already. No worker can have leased a step above `current_step +
    async_level`. A policy above `current_step` cannot serve: the newest one that exists is `current_step`.
    """
    if step < current_step or step - policy_version > async_level:
        return StepFault.STALE
    newest_policy = min(step, current_step)
    if not 0 <= policy_version <= newest_policy or step > newest_step(current_step, async_level):
        return StepFault.FUTURE
    return None
