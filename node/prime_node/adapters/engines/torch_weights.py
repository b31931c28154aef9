"""Conversion of weights to torch tensors and back. bf16 is transmitted as integers with its bits; here it is torch's own type."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from prime_protocol.weights import Weights, WeightTensor

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_STORED = TORCH_DTYPES | {"i16": torch.int16}
"""Types that tensors are converted to. An engine computes with those of TORCH_DTYPES alone."""
_BIT_PATTERNS = {2: torch.uint16, 4: torch.uint32}
"""Element size in bytes -> type in which its bits are transmitted."""


def to_torch(tensor: WeightTensor) -> torch.Tensor:
    """Return a tensor of the same dtype and shape. Do not write to it: it shares memory with the array if that is writable."""
    if tensor.dtype not in TORCH_DTYPES:
        raise ValueError(f"weights of dtype {tensor.dtype} are not supported")
    # torch warns about memory that it may not write to.
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()
    return torch.from_numpy(data).view(TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)


def to_weights(tensors: Iterable[tuple[str, torch.Tensor]], *, dtype: str) -> Weights:
    """Return copies, rounded to `dtype`, that later changes of the tensors do not affect."""
    weights: dict[str, WeightTensor] = {}
    for name, tensor in tensors:
        rounded = torch.empty(tensor.shape, dtype=_STORED[dtype])
        rounded.copy_(tensor.detach())
        bits = rounded.view(-1).view(_BIT_PATTERNS[rounded.element_size()])
        weights[name] = WeightTensor(dtype, tuple(tensor.shape), bits.numpy())
    return weights
