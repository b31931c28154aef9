"""How far AdamW can move a weight in one optimizer step: a check of every step without bundles, and without torch.

With m and v the bias-corrected running means of g and g^2 after t steps, |m| / sqrt(v) is largest for gradients that grow as fast
as the means forget. By Cauchy and Schwarz, with b1^2 < b2,

    |m| / sqrt(v)  <=  sqrt((1 - b1)^2 / (1 - b2) (1 - r^t) / (1 - r) (1 - b2^t)) / (1 - b1^t),      r = b1^2 / b2

and a step moves a weight w by at most lr times that, plus lr decay |w|. Some gradients reach the bound. Published weights are
rounded, by at most half a unit each, which is all that the check sees of a weight whose learning rate is far below its unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prime_protocol.weights import Weights, floats

UNIT_SHARE = 2.0**-8
"""Half a unit of bf16, relative to the value."""


@dataclass(frozen=True, slots=True)
class AdamBound:
    """Bound of one optimizer. Example: AdamBound(0.9, 0.95, 0.0).per_lr(100) is 1.165."""

    beta1: float
    beta2: float
    weight_decay: float

    def per_lr(self, steps: int) -> float:
        """Return the bound on |m| / sqrt(v) at optimizer step number `steps`, counted from 1; infinite if b1^2 >= b2."""
        b1, b2 = self.beta1, self.beta2
        ratio = b1 * b1 / b2 if b2 else math.inf
        if ratio >= 1.0:
            return math.inf
        total = (1 - b1) ** 2 / (1 - b2) * (1 - ratio**steps) / (1 - ratio)
        return math.sqrt(total * (1 - b2**steps)) / (1 - b1**steps)


def bound_faults(
    before: Weights, after: Weights, bound: AdamBound, *, lrs: Mapping[int, float], what: str
) -> tuple[float, list[str]]:
    """Return the largest movement, relative to its bound, and the tensors in which one is beyond it.

    `lrs`: the learning rate of each optimizer step between the two policies, by its number since the optimizer began.
    """
    moved = sum(lr * bound.per_lr(number) for number, lr in lrs.items())
    decayed = bound.weight_decay * sum(lrs.values())
    largest, faults = 0.0, []
    for name, new in after.items():
        old_values, new_values = floats(before[name]).astype(np.float64), floats(new).astype(np.float64)
        far = np.maximum(np.abs(old_values), np.abs(new_values))
        rounded = 0.0 if new.dtype == "fp32" else 2.0 * UNIT_SHARE
        allowed = moved + (decayed + rounded + 1e-5) * far + 1e-12
        share = float((np.abs(new_values - old_values) / allowed).max(initial=0.0))
        largest = max(largest, share)
        if share > 1.0:
            faults.append(f"{what}: a weight of {name} moved {share:.3g} times as far as its optimizer can")
    return largest, faults
