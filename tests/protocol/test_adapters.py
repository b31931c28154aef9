"""Adapters merge into their base by the formula, and into nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from prime_protocol.adapters import AdapterMismatch, AdapterSpec, merged
from prime_protocol.weights import Weights, WeightTensor, floats, root_of, rounded_to

SPEC = AdapterSpec(base="someone/model", base_root="ab" * 32, rank=2, alpha=3, targets=("q",))
LAYER = "model.layers.0.q"
A, B = f"base_model.model.{LAYER}.lora_A.weight", f"base_model.model.{LAYER}.lora_B.weight"


def tensor(shape: tuple[int, ...], *, seed: int, dtype: str = "bf16") -> WeightTensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return rounded_to(values, dtype)


def world(dtype: str = "bf16") -> tuple[Weights, dict[str, WeightTensor]]:
    base = {f"{LAYER}.weight": tensor((5, 7), seed=0, dtype=dtype), "model.norm.weight": tensor((7,), seed=1)}
    return base, {A: tensor((2, 7), seed=2), B: tensor((5, 2), seed=3)}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_product_is_added_and_rounded_once(dtype: str) -> None:
    base, adapters = world(dtype)
    whole = merged(base, adapters, SPEC)
    exact = floats(base[f"{LAYER}.weight"]).astype(np.float64)
    exact += 3 / 2 * floats(adapters[B]).astype(np.float64) @ floats(adapters[A]).astype(np.float64)
    found = floats(whole[f"{LAYER}.weight"])
    step = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp32": 2.0**-22}[dtype]
    assert np.all(np.abs(found - exact) <= step * np.maximum(np.abs(exact), 1.0))
    assert whole["model.norm.weight"] is base["model.norm.weight"]
    assert list(whole) == list(base)


def test_factors_of_zero_change_nothing() -> None:
    base, adapters = world()
    adapters[B] = rounded_to(np.zeros((5, 2), np.float32), "bf16")
    assert root_of(merged(base, adapters, SPEC)) == root_of(base)


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        (A, None, "lacks one of its two factors"),
        (B, None, "lacks one of its two factors"),
        (A.replace("layers.0", "layers.9"), tensor((2, 7), seed=2), "the base lacks it"),
        ("model.norm.weight", tensor((7,), seed=2), "not an adapter's name"),
        (A, tensor((3, 7), seed=2), "shapes"),
        (B, tensor((7, 2), seed=2), "shapes"),
        (A, WeightTensor("i16", (2, 7), np.zeros(14, np.uint16)), "needs a tensor of type"),
    ],
)
def test_what_does_not_belong_to_the_base_is_refused(name: str, changed: WeightTensor | None, reason: str) -> None:
    base, adapters = world()
    adapters.pop(name, None)
    if changed is not None:
        adapters[name] = changed
    with pytest.raises(AdapterMismatch, match=reason):
        merged(base, adapters, SPEC)


def test_rounding_keeps_infinity_and_nan_and_breaks_ties_to_even() -> None:
    values = np.array([np.inf, -np.inf, np.nan, 1.00390625, 1.01171875, -0.0], np.float32)
    assert [f"{bits:04x}" for bits in rounded_to(values, "bf16").data] == [
        "7f80",
        "ff80",
        "7fc0",
        "3f80",
        "3f82",
        "8000",
    ]
