"""Full-precision weights behind the rounded ones that the model computes with.

Workers sample from the published policy, which is rounded. With bf16 most of an update is below half a unit of rounding, so a
forward pass over unrounded weights would be that of another policy: 0.27 nats a token apart after 30 steps at 3e-6 in a
public model of 135 M parameters. So parameters always hold the rounded values. The optimizer works on these masters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from prime_node.adapters.engines.torch_weights import TORCH_DTYPES


class Masters:
    """The fp32 values of parameters that otherwise hold values of `dtype`, sharded as these are.

    Four bytes a parameter; with dtype "fp32" the parameters are their own masters, and nothing is copied.
    """

    def __init__(self, trained: Mapping[str, torch.nn.Parameter], *, dtype: str) -> None:
        self._parameters = trained
        self._dtype = dtype
        self.tensors = dict(trained)
        """The masters by the names of their parameters, for an optimizer and for checkpoints."""
        if dtype != "fp32":
            self.tensors = {name: torch.nn.Parameter(each.detach().clone()) for name, each in trained.items()}
            self.round()

    def take_gradients(self) -> None:
        """Give the masters the gradients of their parameters, for a step of the optimizer."""
        for parameter, master in self._pairs():
            master.grad, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters into their parameters, after anything changed them."""
        for parameter, master in self._pairs():
            parameter.copy_(master.to(TORCH_DTYPES[self._dtype]))

    def _pairs(self) -> Iterable[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Yield parameters with their masters, where these are other tensors."""
        return () if self._dtype == "fp32" else zip(self._parameters.values(), self.tensors.values(), strict=True)


@torch.no_grad()
def round_in_place(parameters: Iterable[torch.nn.Parameter], *, dtype: str) -> None:
    """Round parameters to the values of `dtype`. Their own type stays."""
    for parameter in parameters:
        parameter.copy_(parameter.to(TORCH_DTYPES[dtype]))
