"""Adapters merge into their base by the formula, and into nothing else."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction

import numpy as np
import pytest

from prime_protocol.adapters import AdapterMismatch, AdapterSpec, factors_in_fp32, merged, unit_for
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


def integer_world(dtype: str, *, rank: int, extreme: bool = False) -> tuple[Weights, dict[str, WeightTensor]]:
    """Return a base and factors over the whole range of i16, or at its ends alone."""
    random = np.random.default_rng(rank)
    base = {f"{LAYER}.weight": rounded_to(random.standard_normal((5, 7)).astype(np.float32), dtype)}

    def factor(shape: tuple[int, int]) -> WeightTensor:
        values = random.choice([-(2**15), 2**15 - 1], shape) if extreme else random.integers(-(2**15), 2**15, shape)
        return WeightTensor("i16", shape, values.astype(np.int16).reshape(-1).view(np.uint16))

    return base, {A: factor((rank, 7)), B: factor((5, rank))}


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_product_of_integers_is_exact_and_rounded_as_specified(dtype: str, extreme: bool) -> None:
    rank, unit = 64, -20
    base, adapters = integer_world(dtype, rank=rank, extreme=extreme)
    spec = SPEC.model_copy(update={"rank": rank, "unit_log2": unit})
    found = merged(base, adapters, spec)[f"{LAYER}.weight"]
    integers = {name: tensor.data.view(np.int16).reshape(tensor.shape).tolist() for name, tensor in adapters.items()}
    for row, column in np.ndindex(5, 7):
        total = sum(integers[B][row][k] * integers[A][k][column] for k in range(rank))
        product = np.float32(float(Fraction(total) * Fraction(2) ** (2 * unit)))  # exact as a float
        value = floats(base[f"{LAYER}.weight"])[row, column] + np.float32(3 / rank) * product
        expected = rounded_to(np.array([value], np.float32), dtype)
        assert found.data.reshape(5, 7)[row, column] == expected.data[0]


def test_the_order_of_a_rank_s_columns_changes_no_bit() -> None:
    base, adapters = integer_world("fp32", rank=64)
    spec = SPEC.model_copy(update={"rank": 64, "unit_log2": -11})
    order = np.random.default_rng(1).permutation(64)
    rows, columns = (adapters[name].data.reshape(adapters[name].shape) for name in (A, B))
    permuted = {
        A: WeightTensor("i16", (64, 7), np.ascontiguousarray(rows[order]).reshape(-1)),
        B: WeightTensor("i16", (5, 64), np.ascontiguousarray(columns[:, order]).reshape(-1)),
    }
    assert root_of(merged(base, permuted, spec)) == root_of(merged(base, adapters, spec))


def test_integers_as_floats_are_the_same_adapters() -> None:
    base, adapters = integer_world("bf16", rank=2)
    spec = SPEC.model_copy(update={"unit_log2": -11})
    as_floats = factors_in_fp32(adapters, spec)
    assert {tensor.dtype for tensor in as_floats.values()} == {"fp32"}
    assert root_of(merged(base, as_floats, SPEC)) == root_of(merged(base, adapters, spec))


@pytest.mark.parametrize(("rank", "alpha", "unit_log2"), [(16, 32, -11), (64, 32, -10), (1, 1, -8), (1, 65_536, -24)])
def test_a_unit_follows_from_rank_and_scale(rank: int, alpha: int, unit_log2: int) -> None:
    assert unit_for(rank, alpha) == unit_log2


def test_floats_are_refused_where_integers_are_due() -> None:
    base, adapters = world()
    with pytest.raises(AdapterMismatch, match="needs a tensor of type i16"):
        merged(base, adapters, SPEC.model_copy(update={"unit_log2": -11}))


def test_a_factor_that_is_far_too_large_is_refused_before_it_takes_memory() -> None:
    """Before, its values were made float64 first: eight times the bytes of the policy."""
    base, adapters = world()
    adapters[A] = WeightTensor("i16", (2, 2_000_000), np.zeros(4_000_000, np.uint16))
    tracemalloc.start()
    try:
        with pytest.raises(AdapterMismatch, match="shapes"):
            merged(base, adapters, SPEC.model_copy(update={"unit_log2": -11}))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


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
        (A, tensor((2, 7, 1), seed=2), "shapes"),
        (A, tensor((), seed=2), "shapes"),
        (B, tensor((0, 2), seed=2), "shapes"),
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
