"""Learning rates: warm-up and decay, and a brake for when inference and trainer drift apart.

The brake reads the mean |log ratio| of rollouts that a validator has accepted, so a worker can push it by no more than the
validator's tolerance. One that adapts to unchecked claims would hand the learning rate to strangers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Decay(StrEnum):
    """How the learning rate goes from its height after the warm-up to its final share."""

    CONSTANT = "constant"
    """Not at all."""
    LINEAR = "linear"
    COSINE = "cosine"
    """Half a wave: slow, fast, slow (arXiv 1608.03983, without restarts)."""


@dataclass(frozen=True, slots=True)
class ParameterSchedule:
    """Up to `lr` over the warm-up, then down to `final_share * lr`.

    Example: ParameterSchedule(4e-4, 5, 400, 0.1).at(0) is 8e-5.
    """

    lr: float
    warmup_steps: int
    total_steps: int
    final_share: float
    decay: Decay = Decay.LINEAR

    def at(self, step: int) -> float:
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
    """Scales the learning rate down while policies move faster than rollouts can follow, and slowly up again."""

    log_ratio_max: float
    """Nats. Below it the multiplier recovers; above one and a half times it, the multiplier falls."""
    multiplier_min: float = 0.15

    def after(self, multiplier: float, log_ratio_abs: float) -> float:
        """The multiplier of the next step, from this step's mean |log ratio|."""
        if log_ratio_abs > 1.5 * self.log_ratio_max:
            return max(self.multiplier_min, 0.75 * multiplier)
        if log_ratio_abs < self.log_ratio_max:
            return min(1.0, 1.05 * multiplier)
        return multiplier
