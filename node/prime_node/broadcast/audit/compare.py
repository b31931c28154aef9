"""Compare two sets of weights bit for bit: which tensors differ first, and by how much.

Bits decide, not numbers: -0 is not 0, and two NaNs with one payload are equal. The numbers are for the reader of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_protocol.codec.layout import TYPES
from prime_protocol.weights import Weights, WeightTensor

_PIECE_ELEMENTS = 2**22
"""Elements compared at a time: a comparison needs some tens of MiB in addition to the two sets of weights."""


class Fault(StrEnum):
    """Kind of difference between two tensors."""

    MISSING = "missing"
    """Missing in the other set."""
    EXTRA = "extra"
    """Missing in the signed policy."""
    DTYPE = "dtype"
    SHAPE = "shape"
    VALUES = "values"


@dataclass(frozen=True, slots=True)
class Difference:
    """One tensor that differs. Example: Difference("lm_head.weight", Fault.VALUES, "3 of 1,024 elements ...", 3, 0.015625)."""

    tensor: str
    fault: Fault
    detail: str
    num_elements: int = 0
    """Elements with other bits."""
    largest: float | None = None
    """Largest distance between two elements; None if their type or a value (NaN, infinity) has no distance."""


@dataclass(frozen=True, slots=True)
class CheckpointComparison:
    """Result of a comparison."""

    num_tensors: int
    """Tensors of the signed policy."""
    differences: tuple[Difference, ...]
    """Differences in the signed policy's order; extra tensors last."""

    @property
    def equal(self) -> bool:
        """Whether the two sets are the same."""
        return not self.differences


def compare(signed: Weights, other: Weights) -> CheckpointComparison:
    """Compare `other` with the weights of a verified policy."""
    found = [_compare_tensor(name, tensor, other.get(name)) for name, tensor in signed.items()]
    extra = [
        Difference(name, Fault.EXTRA, "the signed policy has no such tensor") for name in other if name not in signed
    ]
    return CheckpointComparison(len(signed), (*(difference for difference in found if difference), *extra))


def _compare_tensor(name: str, signed: WeightTensor, other: WeightTensor | None) -> Difference | None:
    if other is None:
        return Difference(name, Fault.MISSING, "is missing")
    if signed.dtype != other.dtype:
        return Difference(name, Fault.DTYPE, f"is {other.dtype}, but was signed as {signed.dtype}")
    if signed.shape != other.shape:
        return Difference(name, Fault.SHAPE, f"has shape {list(other.shape)}, but was signed with {list(signed.shape)}")
    count, first, largest = 0, -1, 0.0
    for start in range(0, signed.data.size, _PIECE_ELEMENTS):
        piece = slice(start, start + _PIECE_ELEMENTS)
        ours, theirs = signed.data[piece], other.data[piece]
        places = np.flatnonzero(ours.view(theirs.dtype) != theirs)
        if not places.size:
            continue
        first = start + int(places[0]) if first < 0 else first
        count += places.size
        largest = max(largest, _distance(ours[places], theirs[places], signed.dtype), key=_nan_first)
    if not count:
        return None
    measured = None if np.isnan(largest) else largest
    by = "" if measured is None else f", by {measured:.6g} at most"
    detail = f"{count:,} of {signed.data.size:,} elements differ{by}; the first is number {first:,}"
    return Difference(name, Fault.VALUES, detail, count, measured)


def _nan_first(value: float) -> float:
    return float("inf") if np.isnan(value) else value


def _distance(ours: npt.NDArray[Any], theirs: npt.NDArray[Any], dtype: str) -> float:
    """Return the largest |ours - theirs|; NaN if there is none."""
    a, b = as_numbers(ours, dtype), as_numbers(theirs, dtype)
    if a is None or b is None or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    return float(np.abs(a - b).max())


def as_numbers(bits: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64] | None:
    """Return bit patterns as float64; None for types whose numbers numpy does not know (fp8)."""
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    element = TYPES[dtype]
    if element.is_float:
        return None if element.itemsize == 1 else bits.view(f"<f{element.itemsize}").astype(np.float64)
    return bits.view(f"<i{element.itemsize}" if dtype.startswith("i") else bits.dtype).astype(np.float64)
