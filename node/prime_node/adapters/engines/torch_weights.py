"""Weights as torch tensors, and back. bf16 travels as the integers of its bit patterns; here it is torch's own type."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prime_protocol.weights import Weights, WeightTensor

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_BIT_PATTERNS = {2: torch.uint16, 4: torch.uint32}
"""Bytes of an element -> the type that its bits travel as."""


def to_torch(tensor: WeightTensor) -> torch.Tensor:
    """A tensor of the same dtype and shape. It shares memory with the array where that is writable: do not write to it."""
    if tensor.dtype not in _TORCH_DTYPES:
        raise ValueError(f"weights of dtype {tensor.dtype} cannot be computed with")
    # torch warns when it is handed memory that it may not write to.
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()
    return torch.from_numpy(data).view(_TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)


def to_weights(tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: str) -> Weights:
    """Copies, rounded to `dtype`: later changes of the tensors do not reach them."""
    weights: dict[str, WeightTensor] = {}
    for name, tensor in tensors:
        rounded = torch.empty(tensor.shape, dtype=_TORCH_DTYPES[dtype])
        rounded.copy_(tensor.detach())
        bits = rounded.view(-1).view(_BIT_PATTERNS[rounded.element_size()])
        weights[name] = WeightTensor(dtype, tuple(tensor.shape), bits.numpy())
    return weights
