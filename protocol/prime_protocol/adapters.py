"""Policies that are low-rank adapters of a base model (LoRA, arXiv 2106.09685), and how they are merged.

    W' = round(W + alpha / rank * (B A))      A [rank, in], B [out, rank]; W' has the type of W

Such a policy's tensors are only A and B of every adapted layer, under the names of peft's files. The base is public,
and the RunSpec pins it by its state root. Every engine computes with W': a policy is one set of merged weights. SPEC,
section "Adapters".

Factors are integers times a unit. In float64 their products and sums are exact, so no order of summing gives another W':
W' is the same, bit by bit, on every machine and device. B begins at zero, where floats would have far finer steps than W' shows,
and nearly every element would change in each step: 8 bits an element, against a quarter of a bit.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from pydantic import Field

from prime_protocol.assignment import Name
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.visible import VISIBLE
from prime_protocol.weights import FLOATS, Weights, WeightTensor, floats, rounded_to

INTEGERS = "i16"
"""Type of factors that are integers."""
UNIT_LOG2_MIN = -24
"""Smallest exponent of a unit."""

PREFIX, SUFFIX_A, SUFFIX_B, WEIGHT = "base_model.model.", ".lora_A.weight", ".lora_B.weight", ".weight"


class AdapterSpec(WireModel):
    """Base model and shape of a run's adapters.

    Example: AdapterSpec(base="Qwen/Qwen3-0.6B", base_root="9f3c...", rank=16, alpha=32, targets=("q_proj", "v_proj")).
    """

    base: str = Field(min_length=1, max_length=512, pattern=VISIBLE)
    """Model name of the base on a hub. A participant that keeps it elsewhere configures its own path."""
    base_root: Digest
    """State root of the base's tensors, as its files hold them."""
    rank: int = Field(ge=1, le=65_536)
    """Rows of A, columns of B."""
    alpha: int = Field(ge=1, le=65_536)
    """Numerator of the scale: the product is scaled by alpha / rank."""
    targets: tuple[Name, ...] = Field(default=(), max_length=256)
    """Names of the adapted linear layers; empty means all but the head."""
    unit_log2: int | None = Field(default=None, ge=UNIT_LOG2_MIN, le=0, exclude_if=lambda unit: unit is None)
    """Exponent u of the factors' unit: their tensors are i16, and stand for these integers times 2^u. None: floats."""


def unit_for(rank: int, alpha: int) -> int:
    """Return the exponent of a unit that moves merged weights by about half as much as their rounding to bf16 does.

    Assumptions: weights of in inputs are about 1 / sqrt(in), elements of A about 1 / sqrt(3 in), as peft draws them.
    """
    return min(0, max(UNIT_LOG2_MIN, round(math.log2(2.0**-8 / (alpha / rank * math.sqrt(rank))))))


class AdapterMismatch(ValueError):
    """Mismatch between adapters and their base."""


def merged(base: Weights, adapters: Weights, spec: AdapterSpec) -> dict[str, WeightTensor]:
    """Return the base's tensors with the adapters merged. Raises AdapterMismatch.

    Every adapter must have its layer and its other factor, with the shapes that the layer and the rank require.
    """
    layers = {_layer_of(name) for name in adapters}
    whole = dict(base)
    for layer in layers:
        name = layer + WEIGHT
        factors = [adapters.get(f"{PREFIX}{layer}{suffix}") for suffix in (SUFFIX_A, SUFFIX_B)]
        if name not in base or None in factors:
            raise AdapterMismatch(f"layer {layer}: the base lacks it, or the policy lacks one of its two factors")
        whole[name] = _changed(name, base[name], *(factor for factor in factors if factor is not None), spec=spec)
    return whole


def factors_in_fp32(adapters: Weights, spec: AdapterSpec) -> dict[str, WeightTensor]:
    """Return the factors as float32, which represents each exactly. Raises AdapterMismatch."""
    return {
        name: rounded_to(_factor(name, tensor, spec).astype(np.float32), "fp32") for name, tensor in adapters.items()
    }


def _factor(name: str, tensor: WeightTensor, spec: AdapterSpec) -> npt.NDArray[np.float64]:
    """Return a factor's values, or raise AdapterMismatch for a wrong type."""
    allowed = FLOATS if spec.unit_log2 is None else (INTEGERS,)
    if tensor.dtype not in allowed:
        raise AdapterMismatch(f"{name}: an adapter needs a tensor of type {', '.join(allowed)}")
    if spec.unit_log2 is None:
        return floats(tensor).astype(np.float64)
    return np.ldexp(tensor.data.view(np.int16).reshape(tensor.shape).astype(np.float64), spec.unit_log2)


def _layer_of(name: str) -> str:
    for suffix in (SUFFIX_A, SUFFIX_B):
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name[len(PREFIX) : -len(suffix)]
    raise AdapterMismatch(f"{name} is not an adapter's name: expected {PREFIX}LAYER{SUFFIX_A} or {SUFFIX_B}")


def _changed(
    name: str, weight: WeightTensor, factor_a: WeightTensor, factor_b: WeightTensor, *, spec: AdapterSpec
) -> WeightTensor:
    if weight.dtype not in FLOATS:
        raise AdapterMismatch(f"{name}: an adapted layer needs a weight of type {', '.join(FLOATS)}")
    found = (factor_b.shape, factor_a.shape)  # compared before their values take eight bytes each
    wanted = ((*weight.shape[:1], spec.rank), (spec.rank, *weight.shape[1:]))
    if len(weight.shape) != 2 or found != wanted:
        raise AdapterMismatch(f"{name}: factors of shapes {found}; a weight of shape {weight.shape} needs {wanted}")
    A, B = (_factor(name, factor, spec) for factor in (factor_a, factor_b))
    product = (B @ A).astype(np.float32)
    return rounded_to(floats(weight) + np.float32(spec.alpha / spec.rank) * product, weight.dtype)
