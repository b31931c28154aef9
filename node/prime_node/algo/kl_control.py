"""The coefficient of a divergence in the reward: fixed, or adapted towards a target (arXiv 1909.08593, section 2.2).

    adaptive    coef' = coef (1 + clip(kl / target_kl - 1, -0.2, 0.2) n / horizon)        n rollouts, their mean divergence kl
                and 0 if that is negative

Equal to verl's `kl_ctrl` (verl/trainer/ppo/core_algos.py at 018f23b5) and to OpenRLHF's two controllers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KlControlKind(StrEnum):
    """Rule for the coefficient."""

    FIXED = "fixed"
    ADAPTIVE = "adaptive"
    """It rises while the divergence is above the target, and falls below it."""


@dataclass(frozen=True, slots=True)
class KlControl:
    """The rule with its settings. Example: KlControl(KlControlKind.ADAPTIVE, horizon=10_000, target_kl=0.1)."""

    kind: KlControlKind = KlControlKind.FIXED
    horizon: float = 10_000.0
    """Rollouts in which the coefficient may change by a fifth."""
    target_kl: float = 0.1
    """Divergence in nats a token."""

    def after(self, coef: float, current_kl: float, num_rollouts: int) -> float:
        """Return the coefficient after a batch of so many rollouts with this mean divergence."""
        if self.kind is KlControlKind.FIXED:
            return coef
        error = min(0.2, max(-0.2, current_kl / self.target_kl - 1.0))
        return max(0.0, coef * (1.0 + error * num_rollouts / self.horizon))
