"""Policies that are low-rank adapters of a base model (LoRA, arXiv 2106.09685), and how they are merged.

    W' = round(W + alpha / rank * (B A))      A [rank, in], B [out, rank]; in float32, rounded to the type of W

Such a policy's tensors are only A and B of every adapted layer, under the names of peft's files. The base is public,
and the RunSpec pins it by its state root. Every engine computes with W': a policy is one set of merged weights. SPEC,
section "Adapters".
"""

from __future__ import annotations

import numpy as np
from pydantic import Field

from prime_protocol.assignment import Name
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.visible import VISIBLE
from prime_protocol.weights import FLOATS, Weights, WeightTensor, floats, rounded_to

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


def _layer_of(name: str) -> str:
    for suffix in (SUFFIX_A, SUFFIX_B):
        if name.startswith(PREFIX) and name.endswith(suffix):
            return name[len(PREFIX) : -len(suffix)]
    raise AdapterMismatch(f"{name} is not an adapter's name: expected {PREFIX}LAYER{SUFFIX_A} or {SUFFIX_B}")


def _changed(
    name: str, weight: WeightTensor, factor_a: WeightTensor, factor_b: WeightTensor, *, spec: AdapterSpec
) -> WeightTensor:
    if weight.dtype not in FLOATS or factor_a.dtype not in FLOATS or factor_b.dtype not in FLOATS:
        raise AdapterMismatch(f"{name}: an adapter needs a tensor of type {', '.join(FLOATS)}")
    found, wanted = (factor_b.shape, factor_a.shape), ((*weight.shape[:1], spec.rank), (spec.rank, *weight.shape[1:]))
    if len(weight.shape) != 2 or found != wanted:
        raise AdapterMismatch(f"{name}: factors of shapes {found}; a weight of shape {weight.shape} needs {wanted}")
    scale = np.float32(spec.alpha / spec.rank)
    return rounded_to(floats(weight) + scale * (floats(factor_b) @ floats(factor_a)), weight.dtype)
