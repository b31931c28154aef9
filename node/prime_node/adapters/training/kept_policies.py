"""Earlier policies that the backend keeps: the trained parameters' values, this rank's rows, in the type that loses nothing.

A policy costs 2 bytes a parameter where parameters hold values of bf16, else 4. With adapters only their factors are kept. The
parameters and a kept policy exchange their values, so both exist once, plus one tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from prime_node.ports.train_backend import KeptPolicy
from prime_protocol.errors import LocalError


class KeptPolicies:
    """The kept policies of one backend."""

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], *, dtype: torch.dtype) -> None:
        self._parameters = parameters
        self._dtype = dtype
        self._kept: dict[KeptPolicy, dict[str, Tensor]] = {}

    def keep(self, which: KeptPolicy) -> None:
        """Keep the parameters' current values."""
        self._kept[which] = self.room()
        for name, parameter in self._parameters.items():
            self._kept[which][name].copy_(parameter.detach())

    def room(self) -> dict[str, Tensor]:
        """Return uninitialised tensors for one policy."""
        return {name: torch.empty_like(each.detach(), dtype=self._dtype) for name, each in self._parameters.items()}

    def put(self, which: KeptPolicy, values: dict[str, Tensor]) -> None:
        """Replace a kept policy; without values it is forgotten."""
        self._kept.pop(which, None)
        if values:
            self._kept[which] = values

    def tensors(self, which: KeptPolicy) -> Mapping[str, Tensor]:
        """Return a kept policy by the names of the parameters; empty if none is kept."""
        return self._kept.get(which, {})

    @contextlib.contextmanager
    def in_place(self, which: KeptPolicy) -> Iterator[None]:
        """Give the parameters the kept values within the block. Raises LocalError if none are kept."""
        if which not in self._kept:
            raise LocalError(f"no {which} policy is stored")
        self._exchange(which)
        try:
            yield
        finally:
            self._exchange(which)

    @torch.no_grad()
    def _exchange(self, which: KeptPolicy) -> None:
        for name, parameter in self._parameters.items():
            kept = self._kept[which][name]
            present = parameter.detach().to(self._dtype, copy=True)
            parameter.copy_(kept)
            kept.copy_(present)
