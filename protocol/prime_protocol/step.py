"""Which policy may serve which group and which step: the one rule of asynchronous training, and everyone calls it.

At step n the trainer holds policy n, consumes R groups and produces policy n + 1. Slot m, the m-th group ever asked for,
belongs to step m // R. With the staleness allowance eta (k, where it is a whole number), slot m may be begun on

    policy v    if and only if    v >= max(0, ceil((m + 1) / R - 1 - eta))    which is    m < v R + floor(R (1 + eta))

For whole eta and batches in slot order that says: a rollout tagged n may come from any policy v with 0 <= n - v <= k. k = 0 is
on-policy; k = 2 hides the broadcast (INTELLECT-2, arXiv 2505.07291, section 2.1.2). Other selections and fractions of a step
give the modes of the other frameworks (schedule.py, docs/scheduler.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class StepFault(StrEnum):
    """Why a rollout does not belong to its step."""

    STALE = "stale"
    """Its policy is more than async_level versions behind, or its step has already been trained."""
    FUTURE = "future"
    """Its policy does not exist yet or is newer than its step, or its step cannot have been leased yet."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The rule with a run's numbers. Example: Admission(groups_per_step=32, slots_ahead=96, is_in_order=True) is k = 2."""

    groups_per_step: int
    """R."""
    slots_ahead: int
    """floor(R (1 + eta)), at least R."""
    is_in_order: bool
    """Step n trains slots nR to (n + 1)R - 1. Otherwise a slot may be trained later than its own step, or earlier."""
    lag_max: int | None = None
    """A group that is further behind the step that would train it is never trained on. None: no such bound."""

    @property
    def lag_leased(self) -> int:
        """ceil(eta): how many policies behind the newest one a worker may be and still be leased something."""
        return -(-self.slots_ahead // self.groups_per_step) - 1

    def slots_end(self, policy_version: int) -> int:
        """Slots below this one may be begun on a policy."""
        return policy_version * self.groups_per_step + self.slots_ahead

    def admits_slot(self, slot: int, policy_version: int) -> bool:
        """True if a slot may be begun on a policy."""
        return policy_version >= 0 and slot < self.slots_end(policy_version)

    def admits_step(self, step: int, policy_version: int) -> bool:
        """True if some slot of a step may be begun on a policy."""
        return self.admits_slot(step * self.groups_per_step, policy_version) and not (
            self.is_in_order and policy_version > step
        )

    def last_step(self, policy_version: int) -> int:
        """The last step of which a policy may begin a slot."""
        return (self.slots_end(policy_version) - 1) // self.groups_per_step

    def check(self, step: int, policy_version: int, *, current_step: int) -> StepFault | None:
        """Judge a rollout's tags when it arrives, the trainer working at `current_step`. None means admissible.

        In order: `check_step` below. Otherwise a step that is past may still wait for its slot. Whether it is stale is judged
        when a batch would take it.
        """
        if self.is_in_order:
            return check_step(step, policy_version, async_level=self.lag_leased, current_step=current_step)
        if not 0 <= policy_version <= current_step or step > self.last_step(policy_version):
            return StepFault.FUTURE
        return None

    def check_trained(self, step: int, policy_version: int) -> StepFault | None:
        """Judge a group that is in the batch of `step`, by the policy that its staleness is counted from."""
        if not 0 <= policy_version <= step:
            return StepFault.FUTURE
        lag_max = self.lag_leased if self.is_in_order else step
        if self.lag_max is not None:
            lag_max = min(lag_max, self.lag_max)
        return StepFault.STALE if step - policy_version > lag_max else None


def lag(step: int, policy_version: int) -> int:
    """How many policies a rollout is behind the step that trains it."""
    return step - policy_version


def newest_step(policy_version: int, async_level: int) -> int:
    """The last step that a rollout of `policy_version` may be tagged with."""
    return policy_version + async_level


def check_step(step: int, policy_version: int, *, async_level: int, current_step: int) -> StepFault | None:
    """Judge a rollout's tags at a moment when the trainer works at `current_step`. None means admissible.

    A step below `current_step` has been trained already. A step above `current_step + async_level` cannot have been
    leased by anyone, and a policy above `current_step` cannot serve: the newest one that exists is `current_step`.
    """
    if step < current_step or step - policy_version > async_level:
        return StepFault.STALE
    newest_policy = min(step, current_step)
    if not 0 <= policy_version <= newest_policy or step > newest_step(current_step, async_level):
        return StepFault.FUTURE
    return None
