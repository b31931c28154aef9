"""Estimates over held-out problems, with confidence intervals. Pure.

pass@k      1 - C(n - c, k) / C(n, k): of n completions c are right; unbiased for any n >= k (Chen et al., arXiv 2107.03374)
interval    Wilson's score interval (1927) of a mean in [0, 1]. Completions of one problem are not independent, so the problems
            are counted: their variance gives the equivalent number of independent coin flips (a design effect, as in Miller,
            arXiv 2411.00640). If an environment's rewards leave [0, 1], the normal interval is used
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import comb, sqrt

Z_95 = 1.959964
"""Standard normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Score of one held-out problem's completions. Example: Mark(num_right=3, num_completions=8, reward_mean=0.5)."""

    num_right: int
    num_completions: int
    """Completions with a reward."""
    reward_mean: float
    num_failed: int = 0
    """Completions on which the environment failed: they count as neither right nor wrong."""

    @property
    def share(self) -> float:
        """Return the share of right completions."""
        return self.num_right / self.num_completions


def sampled_figures(marks: Mapping[str, Sequence[Mark]], *, pass_at: Sequence[int]) -> dict[str, float]:
    """Return figures from marks by environment.

    `eval_sampled` is the share of exact answers, `eval_reward` their mean reward, and `eval_pass_at_4` the chance that
    one of four is right, over the problems with enough completions.
    """
    figures = spread("eval_sampled", {name: [mark.share for mark in its] for name, its in marks.items()})
    figures |= spread("eval_reward", {name: [mark.reward_mean for mark in its] for name, its in marks.items()})
    for k in pass_at:
        enough = {name: [mark for mark in its if mark.num_completions >= k] for name, its in marks.items()}
        chances = {
            name: [pass_at_k(mark.num_right, mark.num_completions, k) for mark in its] for name, its in enough.items()
        }
        figures |= spread(f"eval_pass_at_{k}", chances)
    return figures


def spread(name: str, values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of one value for each problem, and `_low` and `_high`, its 95 % confidence interval.

    With several environments, also each environment's figures, after a slash.
    """
    parts = {"": list(chain.from_iterable(values.values()))}
    if len(values) > 1:
        parts |= {f"/{environment}": list(its) for environment, its in values.items()}
    figures: dict[str, float] = {}
    for suffix, its in parts.items():
        if its:
            low, high = interval_95(its)
            figures |= {
                f"{name}{suffix}": statistics.fmean(its),
                f"{name}_low{suffix}": low,
                f"{name}_high{suffix}": high,
            }
    return figures


def pass_at_k(num_right: int, num_completions: int, k: int) -> float:
    """Return the chance that k of a problem's completions, drawn without replacement, include a right one."""
    if not 1 <= k <= num_completions:
        raise ValueError(f"pass@{k} needs at least {k} completions of each problem, there are {num_completions}")
    return 1.0 - comb(num_completions - num_right, k) / comb(num_completions, k)


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the mean of one value for each problem.

    Example: interval_95([1.0] * 10) is about (0.72, 1.0).
    """
    num, mean = len(values), statistics.fmean(values)
    error = statistics.variance(values) / num if num > 1 else 0.0
    if min(values) < 0.0 or max(values) > 1.0:
        return mean - Z_95 * sqrt(error), mean + Z_95 * sqrt(error)
    flips = num if error == 0.0 else max(float(num), mean * (1.0 - mean) / error)
    spread = Z_95**2 / flips
    centre = (mean + spread / 2) / (1.0 + spread)
    half = sqrt(mean * (1.0 - mean) * spread + spread**2 / 4) / (1.0 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)
