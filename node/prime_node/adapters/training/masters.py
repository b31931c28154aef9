"""Full-precision weights behind the rounded ones that the model computes with.

Workers sample from the published policy, which is rounded. With bf16 most of an update is below half a unit of rounding, so a
forward pass over unrounded weights would be that of another policy: 0.27 nats a token apart after 30 steps at 3e-6 in a
public model of 135 M parameters. So parameters always hold the rounded values. The optimizer works on these masters.

Weights of a published model have values of bf16, each in the middle of the interval that rounds to it. A master that began there
would move by half a unit before anything is published: 24 steps of 1e-5 for a weight of 0.1. So each begins at a random place of
its interval. Policy 0 stays the same, and a movement by a hundredth of a unit changes one weight in a hundred by a whole unit.

Factors of adapters may be multiples of a unit instead (prime_protocol.adapters). The same holds for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from zlib import crc32

import torch

from prime_node.adapters.engines.torch_weights import TORCH_DTYPES
from prime_node.adapters.training.sharding import local_rows

HALF_UNIT = 2**15
"""Half of the distance between neighbouring values of bf16, as a difference of bit patterns of fp32."""
SPREAD_ELEMENTS = 2**22
"""Weights whose places are computed at a time, which bounds the memory."""
INTEGER_MAX = 2**15 - 1
"""Largest factor in units: they are published as i16."""


class Masters:
    """The fp32 values of parameters that otherwise hold values of `dtype`, or multiples of 2^unit_log2, sharded as these are.

    Four bytes a parameter; with dtype "fp32" and no unit the parameters are their own masters, and nothing is copied.
    """

    def __init__(self, trained: Mapping[str, torch.nn.Parameter], *, dtype: str, unit_log2: int | None = None) -> None:
        self._parameters = trained
        self._dtype = dtype
        self._unit = None if unit_log2 is None else 2.0**unit_log2
        self.tensors = dict(trained)
        """The masters by the names of their parameters, for an optimizer and for checkpoints."""
        if not self._are_parameters:
            self.tensors = {name: torch.nn.Parameter(each.detach().clone()) for name, each in trained.items()}
            self.round()
            self._spread()

    def take_gradients(self) -> None:
        """Give the masters the gradients of their parameters, for a step of the optimizer."""
        for parameter, master in self._pairs():
            master.grad, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters into their parameters, after anything changed them."""
        for parameter, master in self._pairs():
            if self._unit is None:
                parameter.copy_(master.to(TORCH_DTYPES[self._dtype]))
            else:
                units = (master / self._unit).round_()
                parameter.copy_(units.clamp_(-INTEGER_MAX, INTEGER_MAX).mul_(self._unit))

    @torch.no_grad()
    def _spread(self) -> None:
        """Move masters that equal their parameters to random places that round to these, alike on any number of ranks."""
        if self._unit is None and self._dtype != "bf16":
            return
        for name, master in self.tensors.items():
            rows, first = local_rows(master)
            parameters, _ = local_rows(self._parameters[name])
            start = first * rows[:1].numel() if first else 0
            pieces = zip(
                rows.reshape(-1).split(SPREAD_ELEMENTS), parameters.reshape(-1).split(SPREAD_ELEMENTS), strict=True
            )
            for number, (piece, rounded) in enumerate(pieces):
                places = _places(crc32(name.encode()), start + number * SPREAD_ELEMENTS, piece)
                if self._unit is not None:
                    moved = piece + places * (self._unit / (2 * HALF_UNIT))
                    piece.copy_(torch.where(piece == rounded, moved, piece))
                    continue
                bits = piece.view(torch.int32)
                bits.copy_(torch.where((piece == rounded) & (piece != 0), bits + places, bits))

    @property
    def _are_parameters(self) -> bool:
        return self._dtype == "fp32" and self._unit is None

    def _pairs(self) -> Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Yield parameters with their masters, where these are other tensors."""
        return () if self._are_parameters else zip(self._parameters.values(), self.tensors.values(), strict=True)


def _places(seed: int, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return int32 from 1 - HALF_UNIT to HALF_UNIT - 1 for elements `start` onwards of a tensor: a hash of `seed` and place."""
    mixed = torch.arange(start, start + like.numel(), device=like.device) + (seed << 32)
    for factor in (-7046029254386353131, -4658895280553007687):
        mixed = mixed * factor
        mixed = mixed ^ (mixed >> 31)
    return ((mixed >> 20) % (2 * HALF_UNIT - 1) - (HALF_UNIT - 1)).to(torch.int32)


@torch.no_grad()
def round_in_place(parameters: Iterable[torch.nn.Parameter], *, dtype: str) -> None:
    """Round parameters to the values of `dtype`. Their own type stays."""
    for parameter in parameters:
        parameter.copy_(parameter.to(TORCH_DTYPES[dtype]))
