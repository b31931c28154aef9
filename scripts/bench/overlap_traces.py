"""Traces of generation times for overlap.py and overlap_levers.py, on the scale of verl's experiment with 128 GPUs."""

from __future__ import annotations

import math
import random

GROUPS, WORKERS, MEAN_S = 512, 64, 130.0 * 64 / 512
TRAIN_S = 113.16
SIGMA, CAP = 1.1, 8 * math.exp(1.1**2 / 2)
WARM = 2
"""Steps that fill the pipeline; the time of a step is measured over the steps after them."""


def make_trace(num_groups: int, mean_s: float, seed: int) -> list[float]:
    """Seconds of each group: lognormal with a capped tail, scaled to the mean."""
    rng = random.Random(seed)
    return _scaled([min(rng.lognormvariate(0.0, SIGMA), CAP) for _ in range(num_groups)], mean_s)


def make_prompted_trace(num_groups: int, mean_s: float, seed: int) -> tuple[list[float], list[float]]:
    """Return the same with half of the variance from the prompt, and what a prompt's history tells of each group: that half."""
    rng = random.Random(seed)
    prompts = [rng.gauss(0.0, 1.0) for _ in range(num_groups)]
    raw = [min(math.exp(SIGMA * (prompt + rng.gauss(0.0, 1.0)) / math.sqrt(2)), CAP) for prompt in prompts]
    return _scaled(raw, mean_s), prompts


def _scaled(raw: list[float], mean_s: float) -> list[float]:
    scale = mean_s * len(raw) / sum(raw)
    return [scale * value for value in raw]
