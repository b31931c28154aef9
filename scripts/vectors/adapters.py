"""Golden vectors of adapters: a base's matrix, its two factors, and what they make of it.

The float products are sums of few powers of two, so that no order of summing them gives another float32. Those of integers are
exact in float64, and are rounded once.
"""

from __future__ import annotations

import numpy as np

from prime_protocol.adapters import PREFIX, SUFFIX_A, SUFFIX_B, WEIGHT, AdapterSpec, merged
from prime_protocol.weights import WeightTensor, rounded_to
from vectors.folder import Case, Folder

LAYER = "model.layers.0.self_attn.q_proj"
CASES = (("bf16, scaled by 3 / 2", "bf16", 2, 3), ("fp32, scaled by 4", "fp32", 1, 4), ("fp16, ties", "fp16", 4, 1))
INTEGER_CASES = (("integers, bf16", "bf16", 16, 32, -11), ("integers, fp32, scaled by 1 / 3", "fp32", 3, 1, -20))


def adapters(folder: Folder) -> None:
    folder.cases("adapters", [*(_case(*case) for case in CASES), *(_integer_case(*case) for case in INTEGER_CASES)])


def _integer_case(name: str, dtype: str, rank: int, alpha: int, unit_log2: int) -> Case:
    """Factors over the whole range, whose sums do not fit float32."""
    random = np.random.Generator(np.random.Philox(rank))

    def integers(shape: tuple[int, int]) -> WeightTensor:
        return WeightTensor("i16", shape, random.integers(-(2**15), 2**15, shape).astype("<i2").reshape(-1).view("<u2"))

    spec = AdapterSpec(base="someone/model", base_root="00" * 32, rank=rank, alpha=alpha, unit_log2=unit_log2)
    base = {LAYER + WEIGHT: rounded_to(random.standard_normal((4, 6)).astype(np.float32) * 16, dtype)}
    factors = {f"{PREFIX}{LAYER}{SUFFIX_A}": integers((rank, 6)), f"{PREFIX}{LAYER}{SUFFIX_B}": integers((4, rank))}
    return _stated(name, spec, base, factors)


def _case(name: str, dtype: str, rank: int, alpha: int) -> Case:
    random = np.random.Generator(np.random.Philox(rank))

    def tensor(shape: tuple[int, int], dtype: str) -> WeightTensor:
        values = random.integers(-8, 9, shape) * 2.0 ** random.integers(-4, 3)
        return rounded_to(values.astype(np.float32), dtype)

    spec = AdapterSpec(base="someone/model", base_root="00" * 32, rank=rank, alpha=alpha)
    tensors = {
        LAYER + WEIGHT: tensor((3, 5), dtype),
        f"{PREFIX}{LAYER}{SUFFIX_A}": tensor((rank, 5), "bf16"),
        f"{PREFIX}{LAYER}{SUFFIX_B}": tensor((3, rank), "bf16"),
    }
    base = {LAYER + WEIGHT: tensors.pop(LAYER + WEIGHT)}
    return _stated(name, spec, base, tensors)


def _stated(name: str, spec: AdapterSpec, base: dict[str, WeightTensor], factors: dict[str, WeightTensor]) -> Case:
    return {
        "name": name,
        "spec": spec.model_dump(mode="json"),
        "base": _listed(base),
        "adapters": _listed(factors),
        "expect": _listed(merged(base, factors, spec)),
    }


def _listed(weights: dict[str, WeightTensor]) -> list[Case]:
    return [
        {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "hex": tensor.data.tobytes().hex()}
        for name, tensor in weights.items()
    ]
