"""Which policy may serve which step: the one rule of asynchronous training, and everyone calls it.

At step n the trainer holds policy n, consumes rollouts tagged n and produces policy n + 1. A rollout tagged n may come
from any policy v with 0 <= n - v <= k, where k is the run's async_level. k = 0 is on-policy; k = 2 hides the broadcast
(INTELLECT-2, arXiv 2505.07291, section 2.1.2).
"""

from __future__ import annotations

from enum import StrEnum


class StepFault(StrEnum):
    """Why a rollout does not belong to its step."""

    STALE = "stale"
    """Its policy is more than async_level versions behind, or its step has already been trained."""
    FUTURE = "future"
    """Its policy does not exist yet or is newer than its step, or its step cannot have been leased yet."""


def admits(step: int, policy_version: int, async_level: int) -> bool:
    """True if a rollout of `policy_version` may be trained at `step`. Example: admits(3, 1, 2), but not admits(4, 1, 2)."""
    return policy_version >= 0 and 0 <= step - policy_version <= async_level


def lag(step: int, policy_version: int) -> int:
    """How many policies a rollout is behind the step that trains it."""
    return step - policy_version


def newest_step(policy_version: int, async_level: int) -> int:
    """The last step that a rollout of `policy_version` may be tagged with."""
    return policy_version + async_level


def check(step: int, policy_version: int, *, async_level: int, current_step: int) -> StepFault | None:
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
