"""Workers that cheat, for the demo and for tests of the checks. Never on an honest path.

A cheating worker signs and uploads like any other; only its engine samples from other weights than it claims.
It believes itself to hold the right policy, as a real cheat would say that it does.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import StrEnum

import numpy as np

from prime_node.ports.engine import Engine, GenerateRequest
from prime_protocol.assignment import Sampling
from prime_protocol.rollout import Completion, EngineInfo
from prime_protocol.weights import Weights, WeightTensor

log = logging.getLogger(__name__)


class Cheat(StrEnum):
    """What is wrong with the weights that it samples from."""

    ALTERED = "altered"
    """Gaussian noise of NOISE_SHARE of each tensor's own spread is added."""
    STALE = "stale"
    """The first policy that it got, for ever: it saves the downloads."""


NOISE_SHARE = 0.1


class DishonestEngine:
    """Implements ports.engine.Engine around a real one."""

    def __init__(self, engine: Engine, cheat: Cheat, *, honest_loads: int = 0, seed: int = 0) -> None:
        """`honest_loads`: policies that it takes as they are, to be known as honest first."""
        self._engine = engine
        self._honest_loads = honest_loads
        self._cheat = cheat
        self._rng = np.random.default_rng(seed)
        self._has_weights = False
        log.warning("this worker cheats (%s): it is meant to be found out", cheat)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def load(self, weights: Weights, *, policy_version: int) -> None:
        is_honest = self._honest_loads > 0
        self._honest_loads -= is_honest
        if self._cheat is Cheat.STALE and self._has_weights and not is_honest:
            return
        if self._cheat is Cheat.ALTERED and not is_honest:
            weights = altered(weights, share=NOISE_SHARE, rng=self._rng)
        await self._engine.load(weights, policy_version=policy_version)
        self._has_weights = True

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Completion]:
        return await self._engine.generate(requests, sampling)

    async def close(self) -> None:
        await self._engine.close()


def altered(weights: Weights, *, share: float, rng: np.random.Generator) -> dict[str, WeightTensor]:
    """Other weights: every bf16 and fp32 tensor with noise of `share` times its standard deviation."""
    return {name: _with_noise(tensor, share, rng) for name, tensor in weights.items()}


def _with_noise(tensor: WeightTensor, share: float, rng: np.random.Generator) -> WeightTensor:
    if tensor.dtype == "bf16":
        values = (tensor.data.astype(np.uint32) << 16).view(np.float32)
    elif tensor.dtype == "fp32":
        values = tensor.data.view(np.float32)
    else:
        return tensor
    spread = float(values.std()) if values.size else 0.0
    noisy = (values + rng.normal(0.0, share * spread, values.shape)).astype(np.float32).view(np.uint32)
    if tensor.dtype == "bf16":
        noisy = (noisy >> 16).astype(np.uint16)  # rounding does not matter to a cheat
    return WeightTensor(tensor.dtype, tensor.shape, noisy.astype(tensor.data.dtype))
