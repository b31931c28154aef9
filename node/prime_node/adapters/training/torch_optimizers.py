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
    """Make AdamW in one fused kernel or with 8-bit moments, or the class at `import_path` with the parameters and `kwargs`.

    Raises LocalError.
    """
    if settings.import_path is None and settings.moments == "8bit":
        from prime_node.adapters.training.eight_bit import EightBitAdamW

        return EightBitAdamW(parameters, settings)
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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups; some optimizers have it as a tensor, which compiled steps read."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def plain_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    """Return a parameter's state in plain tensors, for a checkpoint."""
    compact = getattr(optimizer, "plain_state", None)
    found: dict[str, Any] = optimizer.state.get(parameter, {}) if compact is None else compact(parameter)
    return found


def put_state(optimizer: torch.optim.Optimizer, parameter: Tensor, values: dict[str, Any]) -> None:
    """Give a parameter the state of a checkpoint."""
    compact = getattr(optimizer, "put_state", None)
    if compact is None:
        optimizer.state[parameter] = values
    else:
        compact(parameter, values)
