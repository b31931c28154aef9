"""Shared parts of the tests of several validators."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from tests.node.coordinator_world import (
    COORDINATOR,
    ENGINE,
    ROOT,
    TRAINER,
    VALIDATOR,
    Bytes,
    Letters,
    World,
    make_policy,
)

from prime_node.ports.engine import ScoreRequest
from prime_node.validator.config import ValidatorConfig
from prime_node.validator.loop import run_validator as run_validator
from prime_node.validator.scoring_workers import ScoringWorkers
from prime_node.validator.validator import Validator
from prime_protocol.assignment import Sampling
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import RoleKeys
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

SECOND, THIRD = (SigningKey(bytes([number]) * 32) for number in (98, 99))
"""Further validators."""


def keys_with(*validators: SigningKey) -> RoleKeys:
    """Return the keys of a run that has these validators, too."""
    return RoleKeys(
        root=(ROOT.key_id,),
        coordinator=(COORDINATOR.key_id,),
        trainer=(TRAINER.key_id,),
        validator=tuple(key.key_id for key in (VALIDATOR, *validators)),
    )


class Scorer:
    """Implements ports.engine.Scorer: finds what make_parcel claims, once it may."""

    def __init__(self) -> None:
        self.info = ENGINE
        self.may_score = asyncio.Event()
        self.began = asyncio.Event()

    async def load(self, weights: Weights, *, policy_version: int) -> None: ...

    async def prefill(self, requests: Sequence[ScoreRequest], sampling: Sampling) -> Prefill:
        self.began.set()
        await self.may_score.wait()
        claimed = np.array([-0.1, -0.2, -0.3] * len(requests), np.float32)
        return Prefill(claimed, np.zeros_like(claimed))

    async def close(self) -> None: ...


def validator_of(world: World, key: SigningKey, scorer: Scorer) -> Validator:
    async def policy(version: int) -> Weights:
        return make_policy(version)

    return Validator(
        run=world.run,
        config=ValidatorConfig.load({"validator": {"wait_seconds": 0.2, "prefetch": 1}}),
        coordinator=world.client(key),
        scorer=scorer,  # type: ignore[arg-type]
        scoring_workers=ScoringWorkers(lambda: {"letters": Letters()}, workers_max=1),
        tokenizer=Bytes(),
        policy=policy,
        policy_versions=lambda: (0,),
        clock=world.parts.clock,
    )
