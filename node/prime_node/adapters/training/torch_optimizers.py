"""Optimizers by name, or by import path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from prime_node.algo.registry import import_object
from prime_node.ports.train_backend import OptimizerSettings
from prime_protocol.errors import LocalError


def make_optimizer(parameters: Sequence[Tensor], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Make AdamW in one fused kernel, or the class at `import_path` with the parameters and `kwargs`. Raises LocalError."""
    if settings.import_path is None:
        return torch.optim.AdamW(
            parameters, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, fused=True
        )
    factory: Callable[..., Any] = import_object(settings.import_path)
    try:
        optimizer = factory(parameters, **settings.kwargs)
    except (TypeError, ValueError) as error:
        raise LocalError(f"optimizer {settings.import_path}: {error}") from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise LocalError(
            f"optimizer {settings.import_path} returns a {type(optimizer).__name__}, not a torch.optim.Optimizer"
        )
    return optimizer
