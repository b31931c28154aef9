"""Two checks of the trainer's steps without torch: a comparison of two fp32 results, and a bound of what AdamW can do.

The honest update, that of the masters between two published training states, is fitted by the one that was computed here:
honest = a mine + rest. `scale` is |a - 1|, `rest` the norm of the rest relative to the honest update. Rounding moves the
direction a little and the length hardly; another learning rate moves `scale`, other data move `rest`.

The bound of a weight's move in one optimizer step needs no bundles. With m and v the bias-corrected running means of g and g^2
after t steps, |m| / sqrt(v) is largest for gradients that grow as fast as the means forget. By Cauchy and Schwarz, with b1^2 <
b2,

    |m| / sqrt(v)  <=  sqrt((1 - b1)^2 / (1 - b2) (1 - r^t) / (1 - r) (1 - b2^t)) / (1 - b1^t),      r = b1^2 / b2

and a step moves a weight w by at most lr times that, plus lr decay |w|. Some gradients reach the bound. Published weights are
rounded, by at most half a unit each, which is all that the check sees of a weight whose learning rate is far below its unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prime_protocol.training_state import TrainingTensor
from prime_protocol.weights import Weights, WeightTensor, floats

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


@dataclass(frozen=True, slots=True)
class DriftBounds:
    """Largest drift of an honest result, for each re-executed step: drifts of several steps add up."""

    scale: float
    rest: float


BOUNDS = {"fp32": DriftBounds(scale=1e-5, rest=1e-3), "bf16": DriftBounds(scale=2.5e-3, rest=2e-2)}
"""Bounds by the type of forward and backward pass, above what was measured between instruction sets and packings
(docs/replaying.md). They let pass a learning rate off by less than `scale`, and changes of the data that move the update by less
than `rest`."""
REST_MAX = 0.1
"""Sum of the bounds on the rest from which on a comparison is no evidence: a forged update could hide in it."""
OPTIMIZER_EPS = 1e-8
FIRST, SECOND = ".exp_avg", ".exp_avg_sq"
_UNSIGNED = {"fp32": np.uint32, "fp16": np.uint16, "bf16": np.uint16}


@dataclass(frozen=True, slots=True)
class Drift:
    """How far two results are apart."""

    scale: float
    rest: float
    update_norm: float = 0.0
    """Norm of the honest update."""

    def passes(self, bounds: DriftBounds, *, steps: int) -> bool:
        """Return whether so many honest steps may differ so much."""
        return self.scale <= steps * bounds.scale and self.rest <= steps * bounds.rest


@dataclass(frozen=True, slots=True)
class ReadState:
    """The file of a training state, and what it holds."""

    path: Path
    tensors: Sequence[TrainingTensor]

    def values(self, *prefixes: str) -> dict[str, npt.NDArray[np.float64]]:
        """Return the tensors whose names begin so, flat, by name."""
        data, place = np.memmap(self.path, dtype=np.uint8, mode="r"), 0
        found: dict[str, npt.NDArray[np.float64]] = {}
        for tensor in self.tensors:
            if tensor.name.startswith(prefixes):
                raw = np.array(data[place : place + tensor.num_bytes]).view(_UNSIGNED.get(tensor.dtype, np.uint8))
                flat = WeightTensor(tensor.dtype, (raw.size,), raw)
                found[tensor.name] = (floats(flat) if tensor.dtype in _UNSIGNED else raw).astype(np.float64)
            place += tensor.num_bytes
        return found


def drift_between(before: ReadState, honest: ReadState, mine: ReadState, prefix: str = "model.") -> Drift:
    """Compare the masters of two results of the same steps, which began with those of `before`."""
    dot = mine_square = honest_square = 0.0
    start, theirs, ours = (each.values(prefix) for each in (before, honest, mine))
    for name, base in start.items():
        moved, mine_moved = theirs[name] - base, ours[name] - base
        dot += float(moved @ mine_moved)
        mine_square += float(mine_moved @ mine_moved)
        honest_square += float(moved @ moved)
    if not mine_square or not honest_square:
        same = mine_square == honest_square
        return Drift(0.0 if same else math.inf, 0.0 if same else math.inf, math.sqrt(honest_square))
    rest = max(0.0, honest_square - dot * dot / mine_square)
    return Drift(abs(dot / mine_square - 1.0), math.sqrt(rest / honest_square), math.sqrt(honest_square))


def distances(before: ReadState, honest: ReadState, mine: ReadState, *, update_norm: float) -> dict[str, float]:
    """Return how far the tensors are apart that no comparison of the policy's masters shows, by what they are.

    Each is relative: a critic's to its update, a reference policy's to `update_norm`, AdamW's moments to the root of the second
    one and to the direction that both give. All else, such as numbers of steps, must be equal; it is infinitely far otherwise.
    """
    if {(each.name, each.dtype, each.shape) for each in honest.tensors} != {
        (each.name, each.dtype, each.shape) for each in mine.tensors
    }:
        return {"names of tensors": math.inf}
    found: dict[str, float] = {}
    theirs, ours = (each.values("reference.") for each in (honest, mine))
    found["reference policy"] = _relative([theirs[name] - ours[name] for name in theirs], update_norm)
    critic = drift_between(before, honest, mine, "critic.model.")
    found["critic"] = max(critic.scale, critic.rest)
    for prefix in ("", "critic."):
        theirs, ours = (each.values(f"{prefix}optimizer.") for each in (honest, mine))
        roots, directions = (_moments(theirs), _moments(ours)), (_directions(theirs), _directions(ours))
        for what, (one, other) in (("second moments", roots), ("optimizer's direction", directions)):
            norm = math.sqrt(sum(float(each @ each) for each in one.values()))
            found[f"{prefix}{what}"] = _relative([one[name] - other[name] for name in one], norm)
        rest = [name for name in theirs if not name.endswith((FIRST, SECOND))]
        found[f"{prefix}optimizer's other tensors"] = (
            0.0 if all(np.array_equal(theirs[name], ours[name]) for name in rest) else math.inf
        )
    return found


def _moments(state: dict[str, npt.NDArray[np.float64]]) -> dict[str, npt.NDArray[np.float64]]:
    return {name: np.sqrt(np.maximum(each, 0.0)) for name, each in state.items() if name.endswith(SECOND)}


def _directions(state: dict[str, npt.NDArray[np.float64]]) -> dict[str, npt.NDArray[np.float64]]:
    """Return the running mean over the root of that of the squares: what the next step adds to."""
    roots = _moments(state)
    return {
        name: each / (roots.get(f"{name}_sq", 1.0) + OPTIMIZER_EPS)
        for name, each in state.items()
        if name.endswith(FIRST)
    }


def _relative(differences: Sequence[npt.NDArray[np.float64]], norm: float) -> float:
    """Return the norm of differences relative to another; NaN counts as infinite."""
    far = math.sqrt(sum(float(each @ each) for each in differences))
    found = far / norm if norm else 0.0 if not far else math.inf
    return found if found == found else math.inf
