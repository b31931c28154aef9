"""A linear layer with an adapter, computed with the merged and rounded weight that workers compute with.

    y = x round(W + scale B A)^T        A [rank, in], B [out, rank]

An adapter's part of a weight is mostly below half a unit of the weight's rounding, so W x + scale B A x would be the output of
another policy. Gradients pass through the rounding as if it were not there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def merged_weight(rows: Tensor, factor_A: Tensor, factor_B: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return rows of the merged weight; `factor_B` has the same rows. Computed in fp32, then rounded to `dtype`."""
    return (rows.float() + scale * (factor_B.float() @ factor_A.float())).to(dtype)


class MergedLinear(torch.autograd.Function):
    """The layer's function. The merged weight is computed again in the backward pass, so that no pass keeps a second model."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        factor_A: Tensor,
        factor_B: Tensor,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the layer's output in the type of its inputs."""
        ctx.save_for_backward(inputs, weight, factor_A, factor_B)
        ctx.scale, ctx.dtype = scale, dtype
        merged = merged_weight(weight, factor_A, factor_B, scale, dtype)
        return functional.linear(inputs, merged.to(inputs.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs and of both factors."""
        inputs, weight, factor_A, factor_B = ctx.saved_tensors
        of_inputs = None
        if ctx.needs_input_grad[0]:
            merged = merged_weight(weight, factor_A, factor_B, ctx.scale, ctx.dtype)
            of_inputs = gradient @ merged.to(gradient.dtype)
        outer, inner = gradient.flatten(0, -2), inputs.flatten(0, -2)
        of_A = ctx.scale * (outer @ factor_B).T @ inner
        of_B = ctx.scale * outer.T @ (inner @ factor_A.T)
        return of_inputs, None, None, of_A, of_B, None, None
