"""Learning rates: warm-up and decay, and damping for when inference and trainer diverge.

Damping reads the mean |log ratio| of rollouts that a validator has accepted, so a worker can move it by no more than
the validator's tolerance. Damping on unchecked claims would give strangers control of the learning rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Decay(StrEnum):
    """Shape of the decay from the peak after the warm-up to the final share."""

    CONSTANT = "constant"
    """No decay."""
    LINEAR = "linear"
    COSINE = "cosine"
    """Cosine: slow, fast, slow (arXiv 1608.03983, without restarts)."""


@dataclass(frozen=True, slots=True)
class ParameterSchedule:
    """Schedule up to `lr` over the warm-up, then down to `final_share * lr`.

    Example: ParameterSchedule(4e-4, 5, 400, 0.1).at(0) is 8e-5.
    """

    lr: float
    warmup_steps: int
    total_steps: int
    final_share: float
    decay: Decay = Decay.LINEAR

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = min(1.0, (step + 1) / max(1, self.warmup_steps))
        progress = min(1.0, step / max(1, self.total_steps))
        match self.decay:
            case Decay.CONSTANT:
                fallen = 0.0
            case Decay.LINEAR:
                fallen = progress
            case Decay.COSINE:
                fallen = 0.5 - 0.5 * math.cos(math.pi * progress)
        return self.lr * warmup * (1.0 - (1.0 - self.final_share) * fallen)


@dataclass(frozen=True, slots=True)
class Damping:
    """A multiplier on the learning rate. It falls while policies move faster than rollouts can follow, and slowly recovers."""

    log_ratio_max: float
    """Threshold in nats. Below it the multiplier recovers; above 1.5 times the threshold it falls."""
    multiplier_min: float = 0.15

    def after(self, multiplier: float, log_ratio_abs: float) -> float:
        """Return the multiplier of the next step, from this step's mean |log ratio|."""
        if log_ratio_abs > 1.5 * self.log_ratio_max:
            return max(self.multiplier_min, 0.75 * multiplier)
        if log_ratio_abs < self.log_ratio_max:
            return min(1.0, 1.05 * multiplier)
        return multiplier
