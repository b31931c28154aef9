"""Evidence against unseeded engines: honest choices stay far from a ban, other temperatures and other models do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tests.node import calibrating_world
from tests.node.calibrating_world import CALIBRATION, LENGTH, Judged, bundle_of, completions_of, rescored

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.ports.engine import ScoreRequest
from prime_node.validator.calibrating import Errors, choice_moments, raised_choices, sample_honestly
from prime_node.worker.cheats import mapped
from prime_protocol.calibration import evidence_of
from prime_protocol.check_policy import EVIDENCE_MAX
from prime_protocol.evidence import folded, log_evidence
from prime_protocol.rollout import Rollouts
from prime_protocol.verify import LIKELIHOOD_RATIOS, OF_SEEDS, Statistics, statistics

CLASS = "transformers/fp32/cpu"
folder, judged = calibrating_world.folder, calibrating_world.judged


async def choices(judged: Judged, sampled: list[Rollouts], judge: TransformersEngine | None = None) -> Errors:
    """Return a validator's findings for tokens that are declared to come from unassigned randomness."""
    errors = Errors()
    for lease, rollouts in zip(judged.leases, sampled, strict=True):
        prompts = [group.prompt_token_ids for group in lease.groups for _ in group.seeds]
        asked = [ScoreRequest(p, c.token_ids, None) for p, c in zip(prompts, rollouts.completions(), strict=True)]
        found = statistics(rollouts, await (judge or judged.engine).prefill(asked, lease.sampling))
        errors.add({name: values for name, values in found.items() if name not in OF_SEEDS}, rollouts.lengths_N)
    return errors


def log_evidence_of(bundles: list[Statistics], judge: str = CLASS) -> list[float]:
    wealth, logs = folded({}, {}, statistics=CALIBRATION.statistics), []
    for bundle in bundles:
        sums = evidence_of(bundle, CALIBRATION, worker=CLASS, validator=judge).sums
        assert set(LIKELIHOOD_RATIOS) < set(sums)
        wealth = folded(wealth, sums, statistics=CALIBRATION.statistics)
        logs.append(log_evidence(wealth))
    return logs


def tokens_needed(errors: Errors) -> float:
    logs = log_evidence_of([bundle_of([one]) for one in completions_of(errors)])
    return next((LENGTH * (n + 1) for n, log_m in enumerate(logs) if log_m >= math.log(EVIDENCE_MAX)), math.inf)


@pytest.mark.slow  # 2,400 bundles a class
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_honest_choices_are_not_suspected_whatever_their_order(
    judged: Judged, folder: object, dtype: str
) -> None:
    judge = TransformersEngine(folder, dtype=dtype, threads=1)  # type: ignore[arg-type]
    await judge.load(judged.weights, policy_version=0)
    parts = completions_of(await choices(judged, await sample_honestly(judged.engine, judged.leases), judge))
    await judge.close()
    rng, highest = np.random.default_rng(0), []
    for _ in range(60):
        drawn = [bundle_of([parts[i] for i in rng.permutation(len(parts))[:8]]) for _ in range(40)]
        highest.append(max(log_evidence_of(drawn, f"transformers/{dtype}/cpu")))
    assert np.mean(np.array(highest) >= math.log(10)) <= 0.1
    assert max(highest) < math.log(100)


@pytest.mark.parametrize(("temperature", "tokens_max"), [(0.0, 64), (0.8, 3_000), (1.4, 1_500)])
async def test_another_temperature_is_banned_without_any_seed(
    judged: Judged, temperature: float, tokens_max: int
) -> None:
    judged = judged.first(tokens_max)
    other = [
        lease.model_copy(update={"sampling": lease.sampling.model_copy(update={"temperature": temperature})})
        for lease in judged.leases
    ]
    sampled = await rescored(judged, await sample_honestly(judged.engine, other))
    assert tokens_needed(await choices(judged, sampled)) <= tokens_max


async def test_another_model_is_banned_though_the_right_one_gives_its_logprobs(judged: Judged) -> None:
    rng = np.random.default_rng(1)
    other = mapped(judged.weights, lambda values: values + rng.normal(0.0, 0.3 * values.std(), values.shape))
    judged = judged.first(1_000)
    sampled = await rescored(judged, await judged.cheating(other))
    assert tokens_needed(await choices(judged, sampled)) <= 1_000


async def test_engines_that_agree_to_the_last_bits_may_differ_by_next_to_nothing(judged: Judged) -> None:
    sampled = await sample_honestly(judged.engine, judged.leases)
    found = choice_moments(await raised_choices(judged.engine, judged.leases, sampled))
    assert set(found) == set(LIKELIHOOD_RATIOS)
    for moments in found.values():
        assert moments.lambdas == (1.0,)
        assert 0 < moments.log_moments[0] < 0.01, "for so few tokens"
