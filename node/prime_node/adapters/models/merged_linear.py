"""A linear layer with an adapter, computed with the merged and rounded weight that workers compute with.

    W' = round(W + scale B A)        A [rank, in], B [out, rank]
    y = x W'^T

An adapter's part of a weight is mostly below half a unit of the weight's rounding, so W x + scale B A x would be the output of
another policy. The layer's own weight is W': MergedWeights keeps W, and merges after each step of the optimizer. Gradients pass
through the rounding as if it were not there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def merged_weight(rows: Tensor, factor_A: Tensor, factor_B: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return rows of the merged weight, as prime_protocol.adapters does; `factor_B` has the same rows.

    With factors of integers times a unit the product is exact on every device. `dtype` is the result's.
    """
    product = (factor_B.double() @ factor_A.double()).float()
    return (rows.float() + product.mul_(float(np.float32(scale)))).to(dtype)


class MergedLinear(torch.autograd.Function):
    """The layer's function: a linear layer with the merged weight, and the gradients of both factors."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        merged: Tensor,
        bias: Tensor | None,
        factor_A: Tensor,
        factor_B: Tensor,
        scale: float,
    ) -> Tensor:
        """Return the layer's output in the type of its inputs."""
        ctx.save_for_backward(inputs, merged, factor_A, factor_B)
        ctx.scale = scale
        return functional.linear(inputs, merged, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs and of both factors."""
        inputs, merged, factor_A, factor_B = ctx.saved_tensors
        of_inputs = gradient @ merged if ctx.needs_input_grad[0] else None
        outer, inner = gradient.flatten(0, -2), inputs.flatten(0, -2)
        of_A = ctx.scale * (outer @ factor_B).T @ inner
        of_B = ctx.scale * outer.T @ (inner @ factor_A.T)
        return of_inputs, None, None, of_A, of_B, None
