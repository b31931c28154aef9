"""AdamW with 8-bit running means (arXiv 2110.02861): blocks of 256 values with one scale each, in plain torch.

A value is a code times its block's scale, the largest magnitude of the block. The codes' values are dense near 0, in seven
decades. The step itself is computed in fp32, CHUNK values at a time. Small tensors, of fewer than 4,096 values or no multiple of
256, keep fp32. A checkpoint holds all in fp32: made into blocks again, its values get the same codes and scales, bit for bit,
because 1 and -1 are values of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from prime_node.ports.train_backend import OptimizerSettings

BLOCK, SMALL = 256, 4_096
CHUNK = 2**22
"""Values whose step is computed at a time: a multiple of BLOCK."""
SCALE_MIN = 1e-30


@dataclass(frozen=True)
class Blocks:
    """Values in 8 bits. Letters: N blocks, B values of a block."""

    codes_NB: Tensor
    scales_N1: Tensor
    is_signed: bool

    @classmethod
    def empty(cls, like_NB: Tensor, *, is_signed: bool) -> Blocks:
        """Return blocks for as many values, which are written before they are read."""
        return cls(torch.empty_like(like_NB, dtype=torch.uint8), torch.empty_like(like_NB[:, :1]), is_signed)

    def read(self, part: slice) -> Tensor:
        """Return the values [N, B] of some blocks in fp32."""
        values = code_values(self.is_signed, self.codes_NB.device)
        return values[self.codes_NB[part].int()] * self.scales_N1[part]

    def write(self, part: slice, values_NB: Tensor) -> None:
        """Store the values of some blocks, each as the nearest one that has a code."""
        scales_N1 = values_NB.abs().amax(dim=1, keepdim=True).clamp_(min=SCALE_MIN)
        values = code_values(self.is_signed, values_NB.device)
        borders = (values[1:] + values[:-1]) / 2
        self.codes_NB[part] = torch.bucketize(values_NB / scales_N1, borders, out_int32=True).to(torch.uint8)
        self.scales_N1[part] = scales_N1


@dataclass(frozen=True)
class Whole:
    """The values [1, B] of a small tensor in fp32."""

    values_1B: Tensor

    def read(self, part: slice) -> Tensor:
        """Return them."""
        return self.values_1B[part]

    def write(self, part: slice, values_1B: Tensor) -> None:
        """Replace them."""
        self.values_1B[part] = values_1B


@lru_cache
def code_values(is_signed: bool, device: torch.device) -> Tensor:
    """Return the values [256] of the codes, ascending: fractions of a scale, 0 and 1, and -1 with signs."""
    found = [0.0, 1.0, *([-1.0] if is_signed else [])]
    for decade in range(7):
        borders = torch.linspace(0.1, 1.0, 2 ** (decade + (not is_signed)) + 1, dtype=torch.float64)
        values = (10.0 ** (decade - 6) * (borders[1:] + borders[:-1]) / 2).tolist()
        found += [*values, *([-value for value in values] if is_signed else [])]
    if is_signed:
        found.remove(max(value for value in found if value < 0.0))  # the 257th
    return torch.tensor(sorted(found), dtype=torch.float32, device=device)


class EightBitAdamW(torch.optim.Optimizer):
    """AdamW whose state is compact, and whose checkpoints are not."""

    def __init__(self, parameters: Sequence[Tensor], settings: OptimizerSettings) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._settings = settings

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nothing here evaluates it again
        """Take a step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group["lr"])

    def _step(self, parameter: Tensor, lr: float) -> None:
        values_NB, grads_NB = _rows(_local(parameter)), _rows(_local(parameter.grad).contiguous())
        if parameter not in self.state:
            zeros = torch.zeros_like(_local(parameter), dtype=torch.float32)
            self.put_state(parameter, {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros})
        state = self.state[parameter]
        state["step"] += 1
        first, second = self._settings.betas
        size, root = lr / (1 - first ** state["step"].item()), (1 - second ** state["step"].item()) ** 0.5
        for start in range(0, len(values_NB), CHUNK // BLOCK):
            part = slice(start, start + CHUNK // BLOCK)
            grads = grads_NB[part].float()
            mean = state["exp_avg"].read(part).lerp(grads, 1 - first)
            square = state["exp_avg_sq"].read(part).lerp(grads.square(), 1 - second)
            values_NB[part].mul_(1 - lr * self._settings.weight_decay)
            values_NB[part].addcdiv_(mean, (square.sqrt() / root).add_(self._settings.eps), value=-size)
            state["exp_avg"].write(part, mean)
            state["exp_avg_sq"].write(part, square)

    @torch.no_grad()
    def plain_state(self, parameter: Tensor) -> dict[str, Any]:
        """Return a parameter's state with the running means in fp32."""
        state = self.state.get(parameter)
        if state is None:
            return {}
        shape, whole = _local(parameter).shape, slice(None)
        means = {key: state[key].read(whole).reshape(shape) for key in ("exp_avg", "exp_avg_sq")}
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            means = {
                key: DTensor.from_local(
                    one, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
                )
                for key, one in means.items()
            }
        return {"step": state["step"], **means}

    @torch.no_grad()
    def put_state(self, parameter: Tensor, values: dict[str, Any]) -> None:
        """Take over what `plain_state` returned."""
        state: dict[str, Any] = {"step": values["step"].clone().cpu()}
        for key, is_signed in (("exp_avg", True), ("exp_avg_sq", False)):
            rows_NB = _rows(_local(values[key]).to(_local(parameter).device).contiguous())
            is_small = len(rows_NB) == 1
            state[key] = Whole(rows_NB.clone()) if is_small else Blocks.empty(rows_NB, is_signed=is_signed)
            state[key].write(slice(None), rows_NB)
        self.state[parameter] = state


def _local(tensor: Any) -> Tensor:
    found: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _rows(tensor: Tensor) -> Tensor:
    """Return a view of blocks [N, 256], or of one row if the tensor is small."""
    is_small = tensor.numel() < SMALL or tensor.numel() % BLOCK > 0
    return tensor.view(1, -1) if is_small else tensor.view(-1, BLOCK)
