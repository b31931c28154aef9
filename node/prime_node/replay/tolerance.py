"""Comparison of two fp32 results of the same steps on different arithmetic. Without torch.

The honest update, that of the masters between two published training states, is fitted by the one that was computed here:
honest = a mine + rest. `scale` is |a - 1|, `rest` the norm of the rest relative to the honest update. Rounding moves the
direction a little and the length hardly; another learning rate moves `scale`, other data move `rest`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prime_protocol.training_state import TrainingTensor
from prime_protocol.weights import WeightTensor, floats


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
