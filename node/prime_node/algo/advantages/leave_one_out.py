"""Reward minus the mean of the others (RLOO, arXiv 2402.14740).

    A_i = s_i - mean of s_j over j != i = G / (G - 1) * (s_i - mean(s))

The baseline does not depend on the rollout that it is compared with. A group of one has no others and gets 0.
"""

from __future__ import annotations

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs
from prime_node.algo.advantages.group_mean import group_mean


def leave_one_out(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute reward minus the mean of the others; 0 for a group of one."""
    size = len(inputs.rollouts)
    factor = size / (size - 1) if size > 1 else 0.0
    return AdvantageOutputs([factor * advantage for advantage in group_mean(inputs).advantages])
