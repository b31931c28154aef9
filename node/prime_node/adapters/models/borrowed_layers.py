"""Forward passes over weights that are made for one layer at a time, so that only that layer's copy is in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def layers_of(model: nn.Module, count: int) -> list[nn.Module]:
    """Return the model's `count` layers; none if no list of modules is that long, or if layers share parameters."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            names = [id(parameter) for layer in module for parameter in layer.parameters()]
            return list(module) if len(names) == len(set(names)) else []
    return []


@contextlib.contextmanager
def borrowed(layers: Sequence[nn.Module], made: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Give each layer, only while it computes, `made(parameter)` for each of its parameters."""
    own: dict[int, Tensor] = {}

    def lend(layer: nn.Module, *_: Any) -> None:
        with torch.inference_mode(False), torch.no_grad():  # a parameter takes no tensor of the inference mode
            for parameter in layer.parameters():
                own[id(parameter)] = parameter.data
                parameter.data = made(parameter)

    def give_back(layer: nn.Module, *_: Any) -> None:
        for parameter in layer.parameters():
            if id(parameter) in own:  # an error may come between two of them
                parameter.data = own.pop(id(parameter))

    hooks = [layer.register_forward_pre_hook(lend) for layer in layers]
    hooks += [layer.register_forward_hook(give_back, always_call=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
