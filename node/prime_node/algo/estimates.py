"""Figures over held-out problems, and how sure they are. Pure.

pass@k      1 - C(n - c, k) / C(n, k): of n completions c are right; without bias for any n >= k (Chen et al., arXiv 2107.03374)
interval    Wilson's score interval (1927) of a mean in [0, 1]. Completions of one problem are no independent looks at the model,
            so the problems are counted: their variance says how many plain coin flips they are worth (a design effect, as in
            Miller, arXiv 2411.00640)
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from math import comb, sqrt

Z_95 = 1.959964
"""Standard normal quantile of a two-sided 95 %."""


def pass_at_k(num_right: int, num_completions: int, k: int) -> float:
    """The chance that k of a problem's completions, drawn without putting back, hold a right one."""
    if not 1 <= k <= num_completions:
        raise ValueError(f"pass@{k} needs at least {k} completions of each problem, there are {num_completions}")
    return 1.0 - comb(num_completions - num_right, k) / comb(num_completions, k)


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """Of the mean of one value in [0, 1] for each problem. Example: interval_95([1.0] * 10) is about (0.72, 1.0)."""
    num, mean = len(values), statistics.fmean(values)
    error = statistics.variance(values) / num if num > 1 else 0.0
    flips = num if error == 0.0 else max(float(num), mean * (1.0 - mean) / error)
    spread = Z_95**2 / flips
    centre = (mean + spread / 2) / (1.0 + spread)
    half = sqrt(mean * (1.0 - mean) * spread + spread**2 / 4) / (1.0 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
