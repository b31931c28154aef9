"""Golden vectors of adapters: a base's matrix, its two factors, and what they make of it.

The products are sums of few powers of two, so that no order of summing them gives another float32.
"""

from __future__ import annotations

import numpy as np

from prime_protocol.adapters import PREFIX, SUFFIX_A, SUFFIX_B, WEIGHT, AdapterSpec, merged
from prime_protocol.weights import WeightTensor, rounded_to
from vectors.folder import Case, Folder

LAYER = "model.layers.0.self_attn.q_proj"
CASES = (("bf16, scaled by 3 / 2", "bf16", 2, 3), ("fp32, scaled by 4", "fp32", 1, 4), ("fp16, ties", "fp16", 4, 1))


def adapters(folder: Folder) -> None:
    folder.cases("adapters", [_case(*case) for case in CASES])


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
    return {
        "name": name,
        "spec": spec.model_dump(mode="json"),
        "base": _listed(base),
        "adapters": _listed(tensors),
        "expect": _listed(merged(base, tensors, spec)),
    }


def _listed(weights: dict[str, WeightTensor]) -> list[Case]:
    return [
        {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "hex": tensor.data.tobytes().hex()}
        for name, tensor in weights.items()
    ]
