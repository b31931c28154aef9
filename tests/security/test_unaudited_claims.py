"""Claimed logprobs of a bundle that no validator recomputed: how far they can move an optimizer step.

Every test trains a real small model. The step is read from the weights before and after plain gradient descent.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.node.batch_coordinator import write_model

from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import LOSSES
from prime_node.ports.train_backend import OptimizerSettings, StepStats
from prime_node.ports.train_samples import Group, TrainSample
from prime_node.trainer.batch import prepare
from prime_node.trainer.config import TrainerConfig
from prime_node.trainer.other_policies import with_selected
from prime_node.trainer.recipe import Recipe
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.weights import Weights

GROUPS, ROLLOUTS, TOKENS = 4, 4, 4
SAMPLED = sorted(set(LOSSES) - {"sft", "opd"})
"""Losses that use the sampler's logprobs and need no teacher."""
PLAIN = OptimizerSettings(import_path="torch.optim.SGD")
Step = npt.NDArray[np.float32]
"""Change of all weights, as one vector."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def groups(folder: Path) -> list[Group]:
    """Sixteen rollouts of four prompts with the policy's own logprobs; no validator has checked them."""
    rng = random.Random(3)
    found = []
    for slot in range(GROUPS):
        prompt = tuple(rng.randrange(256) for _ in range(3))
        tokens = [tuple(rng.randrange(256) for _ in range(TOKENS)) for _ in range(ROLLOUTS)]
        samples = [TrainSample(prompt, each, (0.0,) * TOKENS, 1.0) for each in tokens]
        logprobs = backend(folder).logprobs(samples)
        completions = tuple(
            Completion(each, tuple(its), FinishReason.LENGTH) for each, its in zip(tokens, logprobs, strict=True)
        )
        rewards = (0.0, *(rng.random() for _ in range(ROLLOUTS - 1)))
        found.append(Group(slot, prompt, completions, rewards, (0,) * ROLLOUTS, "anna", claimed=True))
    return found


def backend(folder: Path) -> TorchBackend:
    return TorchBackend(folder, seed=1, threads=1, row_tokens=64, published_dtype="fp32")


def recipe(loss: str, **settings: object) -> Recipe:
    config = TrainerConfig.model_validate({"loss": {"type": loss}, "filters": (), **settings})
    return Recipe.of(config, max_steps=1, completion_tokens_max=TOKENS, vocab_size=264)


def samples_of(groups: Sequence[Group], by: Recipe) -> tuple[TrainSample, ...]:
    return prepare(groups, by, step=0).samples


def step(folder: Path, samples: Sequence[TrainSample], by: Recipe) -> tuple[Step, StepStats]:
    trained = backend(folder)
    trained.new_optimizer(PLAIN)
    before = flat(trained.snapshot())
    if by.chooses_tokens:
        samples = with_selected(samples, by, trained, seed=7)
    stats = trained.train_step(samples, by.loss, lr=1.0)
    return flat(trained.snapshot()) - before, stats


def flat(weights: Weights) -> Step:
    return np.concatenate([weights[name].data.view(np.float32) for name in sorted(weights)])


def cosine(one: Step, other: Step) -> float:
    return float(one @ other) / max(math.sqrt(float(one @ one) * float(other @ other)), 1e-30)


def lying(groups: Sequence[Group], nats: float) -> list[Group]:
    """Lower the claimed logprobs of the first rollout by this many nats."""
    first = groups[0].completions[0]
    lie = replace(first, logprobs=tuple(each - nats for each in first.logprobs))
    return [replace(groups[0], completions=(lie, *groups[0].completions[1:])), *groups[1:]]


@pytest.mark.parametrize("loss", SAMPLED)
def test_a_false_claim_of_twenty_nats_does_not_decide_the_step(folder: Path, groups: list[Group], loss: str) -> None:
    by = recipe(loss)
    samples = samples_of(lying(groups, 20.0), by)
    taken, stats = step(folder, samples, by)
    others, _ = step(folder, samples[1:], by)
    own, _ = step(folder, [replace(samples[0], claim_nats_max=math.inf)], by)
    assert cosine(taken, others) > 0.999
    assert abs(cosine(taken, own)) < 0.35
    assert stats.metrics["claims_masked_share"] == 1 / (GROUPS * ROLLOUTS)
    assert stats.log_ratio_abs < 1e-4


@pytest.mark.parametrize("nats", [20.0, 3e38, -20.0])
def test_a_false_claim_does_not_damp_the_learning_rate(folder: Path, groups: list[Group], nats: float) -> None:
    by = recipe("aipo", lr_damping_nats=0.07)
    _, stats = step(folder, samples_of(lying(groups, nats), by), by)
    assert by.next_multiplier(1.0, stats.log_ratio_abs) == 1.0


def test_honest_claims_train_exactly_as_without_the_bound(folder: Path, groups: list[Group]) -> None:
    for loss in SAMPLED:
        bounded, free = recipe(loss), recipe(loss, claim_nats_max=math.inf)
        taken, stats = step(folder, samples_of(lying(groups, 0.1), bounded), bounded)
        expected, its = step(folder, samples_of(lying(groups, 0.1), free), free)
        assert np.array_equal(taken, expected), loss
        assert (stats.loss, stats.grad_norm, stats.log_ratio_abs) == (its.loss, its.grad_norm, its.log_ratio_abs)
        assert stats.metrics["claims_masked_share"] == 0.0
        assert "claims_masked_share" not in its.metrics


def test_logprobs_that_a_validator_computed_are_not_bounded(folder: Path, groups: list[Group]) -> None:
    by = recipe("aipo")
    audited = [replace(group, claimed=False) for group in lying(groups, -20.0)]
    _, stats = step(folder, samples_of(audited, by), by)
    assert stats.log_ratio_abs == pytest.approx(20.0 / (GROUPS * ROLLOUTS), rel=1e-4)
    assert "claims_masked_share" not in stats.metrics
