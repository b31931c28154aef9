"""AdamW with 8-bit running means, from torchao (arXiv 2110.02861): blocks of 256 values with one scale each.

Small tensors, of fewer than 4,096 values or no multiple of 256, keep theirs in fp32. On GPUs torchao compiles the step for each
shape of a tensor, once a process; on CPUs it runs uncompiled, so it is slow there.

A checkpoint holds the running means in fp32, because torch's format knows no blocks. Made into blocks again, some differ in the
last place: the largest code is 1, the smallest -0.993. So saving does that to the optimizer's own state too, and a resumed run
remains bit for bit the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchao.optim import AdamW8bit
from torchao.optim.subclass_8bit import OptimState8bit

from prime_node.ports.train_backend import OptimizerSettings


class EightBitAdamW(AdamW8bit):
    """AdamW whose state is compact, and whose checkpoints are not."""

    def __init__(self, parameters: Sequence[Tensor], settings: OptimizerSettings) -> None:
        super().__init__(parameters, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)

    def step(self, closure: Any = None) -> Any:
        """Take a step, compiled on a GPU."""
        on_cpu = all(tensor.device.type == "cpu" for group in self.param_groups for tensor in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
            return super().step(closure)

    def plain_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state with all running means in fp32, and continue with what these become when they are read."""
        plain = {key: _plain(value) for key, value in self.state.get(parameter, {}).items()}
        if plain:
            self.put_state(parameter, plain)
        return plain

    @torch.no_grad()
    def put_state(self, parameter: Tensor, values: dict[str, Any]) -> None:
        """Take over what `plain_state` returned."""
        state = {"step": values["step"].clone().cpu()}
        for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[key] = self._new_buffer(parameter, signed)
            _local(state[key]).copy_(_local(values[key]))
        self.state[parameter] = state


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _plain(value: Any) -> Any:
    if not isinstance(value, Tensor) or not isinstance(_local(value), OptimState8bit):
        return value
    plain = _local(value).dequantize()
    if not isinstance(value, DTensor):
        return plain
    return DTensor.from_local(
        plain, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )
