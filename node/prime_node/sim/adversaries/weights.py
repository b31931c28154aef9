"""Cheats that sample from other weights than they claim: cheaper, older or damaged ones."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from prime_node.sim.adversaries.engine import ChooseWeights, Means
from prime_protocol.weights import Weights, WeightTensor

Floats = npt.NDArray[np.float32]

NOISE_SHARE = 0.1
"""Noise relative to a tensor's own standard deviation."""
INT4_GROUP = 32
"""Values that share a scale."""


def older(steps: int) -> ChooseWeights:
    """Load the policy of `steps` steps before."""
    return lambda means: means.seen[max(0, len(means.seen) - 1 - steps)]


def first(means: Means) -> Weights:
    """Keep the first policy of the cheat forever: it saves the downloads."""
    means.kept = means.kept or means.seen[-1]
    return means.kept


def base(means: Means) -> Weights:
    """Load the model with which the run began."""
    assert means.base is not None
    return means.base


def noisy(means: Means) -> Weights:
    """Add Gaussian noise of a tenth of each tensor's own spread: what a broken or hostile machine may hold."""
    return mapped(
        means.seen[-1], lambda values: values + means.rng.normal(0.0, NOISE_SHARE * values.std(), values.shape)
    )


def int8(means: Means) -> Weights:
    """Round to 8 bits, with a scale for each row: half the memory."""
    return mapped(means.seen[-1], lambda values: quantised(values, group=values.shape[-1], largest=127))


def int4(means: Means) -> Weights:
    """Round to 4 bits, with a scale for each 32 values: a quarter of the memory."""
    return mapped(means.seen[-1], lambda values: quantised(values, group=INT4_GROUP, largest=7))


def quantised(values: Floats, *, group: int, largest: int) -> Floats:
    """Round matrices to 2 * largest + 1 levels for each group of values; vectors, which are small, stay."""
    if values.ndim < 2 or values.size % group:
        return values
    rows = values.reshape(-1, group)
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), 1e-12) / largest
    found: Floats = (np.round(rows / scales) * scales).reshape(values.shape)
    return found


def mapped(weights: Weights, change: Callable[[Floats], npt.NDArray[np.floating]]) -> dict[str, WeightTensor]:
    """Return new weights with every bf16 and fp32 tensor changed, and the others as they are."""
    return {name: _mapped(tensor, change) for name, tensor in weights.items()}


def _mapped(tensor: WeightTensor, change: Callable[[Floats], npt.NDArray[np.floating]]) -> WeightTensor:
    if tensor.dtype not in ("bf16", "fp32") or not tensor.data.size:
        return tensor
    words = tensor.data.astype(np.uint32) << 16 if tensor.dtype == "bf16" else tensor.data
    values = change(words.view(np.float32).reshape(tensor.shape)).astype(np.float32).reshape(-1)
    words = values.view(np.uint32)
    if tensor.dtype == "bf16":
        words = (words + 0x8000) >> 16  # to nearest; a tie does not matter to a cheat
    return WeightTensor(tensor.dtype, tensor.shape, words.astype(tensor.data.dtype))
