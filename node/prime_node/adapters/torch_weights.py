"""Weights as torch tensors. bf16 travels as the unsigned integers of its bit patterns; here it becomes torch's own type."""

from __future__ import annotations

import torch

from prime_protocol.weights import WeightTensor

_TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def to_torch(tensor: WeightTensor) -> torch.Tensor:
    """A tensor of the same dtype and shape. It shares memory with the array where that is writable: do not write to it."""
    if tensor.dtype not in _TORCH_DTYPES:
        raise ValueError(f"weights of dtype {tensor.dtype} cannot be computed with")
    # torch warns when it is handed memory that it may not write to.
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()
    return torch.from_numpy(data).view(_TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
