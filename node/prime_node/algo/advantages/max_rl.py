"""MaxRL (arXiv 2602.02710): maximum likelihood of success, which weighs a prompt by the inverse of its success rate.

    A_i = (s_i - mean(s)) / mean(s)        where the mean is positive; else s_i - mean(s)

prime-rl has it as `max_rl` (docs/algorithms.md at 004274ec).
"""

from __future__ import annotations

import statistics

from prime_node.algo.advantages.base import AdvantageInputs, AdvantageOutputs
from prime_node.algo.advantages.group_mean import group_mean


def max_rl(inputs: AdvantageInputs) -> AdvantageOutputs:
    """Compute reward minus group mean, relative to that mean if it is positive; 0 for a group of equal rewards."""
    mean = statistics.fmean(inputs.rewards) if inputs.rewards else 0.0
    return AdvantageOutputs([value / mean if mean > 0.0 else value for value in group_mean(inputs).advantages])
