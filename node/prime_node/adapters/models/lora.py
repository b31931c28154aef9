"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: the model's own weights are frozen, and small factors A and B are trained.

    W' = W + scale * B A        A [rank, in] drawn by the seed, B [out, rank] zeros: training begins at W

Merged, W' is published under W's own name, so workers need no support for adapters. Alone, the factors are published under
peft's file names, and workers add them to the base that the RunSpec pins (prime_protocol.adapters). In both cases workers
compute with W' rounded, and so do the layers here: y = x W'^T.

An adapter's part of a weight is mostly below half a unit of the weight's rounding, so W x + scale B A x would be the output of
another policy. The layer's own weight is W': MergedWeights keeps W, and merges after each step of the optimizer. Gradients pass
through the rounding as if it were not there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from prime_node.adapters.models.hub_names import hub_names
from prime_node.adapters.training.sharding import local_rows
from prime_protocol.adapters import PREFIX
from prime_protocol.errors import LocalError


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


ADAPTER = "policy"
_BASE = ".base_layer."


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Settings of the adapters. Example: LoraSettings(rank=16, alpha=32, targets=("q_proj", "v_proj"))."""

    rank: int
    alpha: int
    """Numerator of the scale: scale = alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of linear layers; empty for all but the head."""
    alone: bool = False
    """Whether to publish the factors by themselves."""
    unit_log2: int | None = None
    """Exponent of the factors' unit, if they are published as integers."""


def add_adapters(model: Any, settings: LoraSettings) -> None:
    """Add adapters in place; afterwards only they are trainable. Raises LocalError for an unknown target or too high a rank."""
    _require_narrow(model, settings.rank)
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets) if settings.targets else "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:
        raise LocalError(f"trainer.lora: {error}") from None


def _require_narrow(model: Any, rank: int) -> None:
    """Check a rank before anything is allocated. Raises LocalError: wider factors than the model's layers add nothing."""
    width = max((min(one.weight.shape) for one in model.modules() if isinstance(one, torch.nn.Linear)), default=0)
    if rank > width:
        raise LocalError(f"trainer.lora: rank is {rank:,}, above {width:,}, which is as wide as the model's layers are")


def compute_merged(model: Any, dtype_of: Callable[[str], torch.dtype]) -> None:
    """Make adapted layers compute with their merged weight. `dtype_of` its published name is the type that it is rounded to."""
    for name, layer in _adapted(model):
        layer.forward = partial(_forward, layer)
        layer.merged_dtype = dtype_of(f"{name}.weight")


class MergedWeights:
    """The base's weights of adapted layers, whose own weights are the merged ones: this rank's rows."""

    def __init__(self, model: Any) -> None:
        self._layers = [layer for _, layer in _adapted(model)]
        self._rows = [
            local_rows(layer.base_layer.weight)[0].to(layer.merged_dtype, copy=True) for layer in self._layers
        ]

    @torch.no_grad()
    def merge(self) -> None:
        """Compute the layers' weights, after anything changed the factors. A collective."""
        for layer, rows in zip(self._layers, self._rows, strict=True):
            factor_A, factor_B = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
            whole_A = factor_A.full_tensor() if isinstance(factor_A, DTensor) else factor_A
            own_B = local_rows(factor_B)[0]
            merged = merged_weight(rows, whole_A.to(own_B.device), own_B, layer.scaling[ADAPTER], layer.merged_dtype)
            local_rows(layer.base_layer.weight)[0].copy_(merged)


def _adapted(model: Any) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in model.named_modules() if ADAPTER in getattr(layer, "lora_A", ()))


def _forward(layer: Any, inputs: Tensor) -> Tensor:
    base = layer.base_layer
    factor_A, factor_B = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    apply: Any = MergedLinear.apply
    found: Tensor = apply(inputs, base.weight, base.bias, factor_A, factor_B, layer.scaling[ADAPTER])
    return found


def draw_adapters(model: Any, *, seed: int) -> None:
    """Initialise the adapters, with the same A for any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                whole = torch.empty(parameter.shape)
                torch.nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
                rows, first = local_rows(parameter)
                rows.copy_(whole[first : first + len(rows)])
            elif "lora_B" in name:
                local_rows(parameter)[0].zero_()


def base_name(name: str) -> str:
    """Return a parameter's name in the model without adapters."""
    return name.replace(_BASE, ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter is a factor of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def is_published(name: str, settings: LoraSettings | None) -> bool:
    """Return whether a parameter is one of a policy's tensors, or a part of one."""
    return is_adapter(name) == (settings is not None and settings.alone)


def published(model: Any, settings: LoraSettings | None) -> Iterator[tuple[str, Tensor]]:
    """Yield a policy's tensors by their published names: this rank's rows if it is sharded."""
    if settings is not None and settings.alone:
        return _factors(model, unit=2.0 ** (settings.unit_log2 or 0))
    return _whole(model)


def _factors(model: Any, *, unit: float) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            yield PREFIX + name.replace(f".{ADAPTER}.", "."), local_rows(parameter)[0].detach() / unit


def _whole(model: Any) -> Iterator[tuple[str, Tensor]]:
    names = hub_names(model.config.model_type)
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            rows, first = local_rows(parameter)
            yield from names.published(base_name(name), rows, shape=tuple(parameter.shape), first=first)
