"""Shared parts of the tests of calibration: bundles that a real engine samples, and how they are judged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.cli.shipped import shipped_calibration
from prime_node.cli.wire_measurement import random_model
from prime_node.validator.calibrating import Errors, LeaseSeries, measure_pair, random_prompts, sample_honestly
from prime_protocol.assignment import Lease, Sampling
from prime_protocol.rollout import Rollouts
from prime_protocol.verify import Statistics
from prime_protocol.weights import Weights

CALIBRATION = shipped_calibration()
LENGTH = 32


@dataclass
class Judged:
    """An honest engine and an honest judge of one class, with the policy that both hold."""

    engine: TransformersEngine
    weights: Weights
    leases: list[Lease]

    def first(self, num_tokens: int) -> Judged:
        """Return the same with only the first leases, of at least so many tokens: the rest of a life that ends by then."""
        leases = [lease for place, lease in enumerate(self.leases) if _tokens_of(self.leases[:place]) < num_tokens]
        return replace(self, leases=leases)

    async def statistics(self, sampled: list[Rollouts], judge: TransformersEngine | None = None) -> Errors:
        return await measure_pair(judge or self.engine, self.leases, sampled)

    async def cheating(self, weights: Weights) -> list[Rollouts]:
        """The same leases by other weights; the engine holds the right ones again afterwards."""
        await self.engine.load(weights, policy_version=1)
        sampled = await sample_honestly(self.engine, self.leases)
        await self.engine.load(self.weights, policy_version=0)
        return sampled


def _tokens_of(leases: list[Lease]) -> int:
    return LENGTH * sum(lease.num_rollouts for lease in leases)


def leases_of(seed: int) -> list[Lease]:
    """Leases of about 4,000 tokens over random prompts."""
    prompts = random_prompts(64, vocab_size=264, tokens_max=24, seed=5)
    sampling = Sampling(completion_tokens_max=LENGTH, stop_token_ids=())
    return LeaseSeries(prompts, sampling, seed=seed).first(4_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def judged(folder: Path) -> AsyncIterator[Judged]:
    engine, weights = TransformersEngine(folder, threads=1), initial_weights(folder, 5)
    await engine.load(weights, policy_version=0)
    yield Judged(engine, weights, leases_of(seed=5))
    await engine.close()


def completions_of(errors: Errors) -> list[dict[str, npt.NDArray[np.float32]]]:
    """The statistics of each completion by itself."""
    num = sum(map(len, errors.lengths))  # completions of one length have equally many values of each statistic
    split = {name: np.split(np.concatenate(parts), num) for name, parts in errors.values.items()}
    return [dict(zip(split, parts, strict=True)) for parts in zip(*split.values(), strict=True)]


def bundle_of(parts: list[dict[str, npt.NDArray[np.float32]]]) -> Statistics:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


async def rescored(judged: Judged, sampled: list[Rollouts]) -> list[Rollouts]:
    """Rescore the tokens of other weights: the right weights give the logprobs (and would give the proofs)."""
    honest = []
    for lease, rollouts in zip(judged.leases, sampled, strict=True):
        one = replace(judged, leases=[lease])
        blank = replace(rollouts, logprobs_T=np.zeros_like(rollouts.logprobs_T), proofs_CB=None)
        errors = await one.statistics([blank])
        honest.append(replace(blank, logprobs_T=-np.concatenate(errors.values["logprob"])))
    return honest
