"""The Scorer port over vLLM, against the transformers scorer: the numbers must be the same within fp32 arithmetic."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio
from tests.conformance.engine_world import (
    FLIPS_SHARE_MAX,
    LOGPROB_ERROR_MAX,
    PROOF_ERROR_MAX,
    SAMPLING,
    descendants,
    distances,
    logprobs_of,
    requests,
    to_score,
)

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.ports.engine import EngineDied, EngineMismatch, GenerateRequest, ScoreRequest
from prime_node.validator.calibrating import local_lease, measure_pair, sample_honestly
from prime_node.worker.cheats import mapped, quantised
from prime_protocol.assignment import GroupAssignment, Lease, Problem
from prime_protocol.calibration import Calibration, PairMoments, evidence_of
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.rollout import Rollouts
from prime_protocol.verdict import Verdict
from prime_protocol.verify import Prefill, summary, verdict_on
from prime_protocol.weights import Weights

if TYPE_CHECKING:
    from prime_node.adapters.engines.vllm_scorer import VllmScorer

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    # They occur when vLLM is imported and when its engine starts; we can fix neither.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]
SAME = 1e-3
"""Tolerance of all numbers of a prefill."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def judge(folder: Path) -> AsyncIterator[VllmScorer]:
    from prime_node.adapters.engines.vllm_scorer import VllmScorer

    made = VllmScorer(folder, context_tokens_max=128)
    yield made
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(folder: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folder)
    yield made
    await made.close()


def assert_same(found: Prefill, expected: Prefill) -> None:
    ours, theirs = found.arrays(), expected.arrays()
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"hidden_TD"}:
        np.testing.assert_allclose(ours[name], theirs[name], atol=SAME, rtol=SAME, err_msg=name)


@pytest.mark.parametrize("update", [{}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 0.0}])
async def test_it_judges_as_transformers_does(
    judge: VllmScorer, reference: TransformersEngine, policies: list[Weights], update: dict[str, float]
) -> None:
    sampling = SAMPLING.model_copy(update=update)
    asked = [replace(request, proofs=True) for request in requests()]
    for scorer in (judge, reference):
        await scorer.load(policies[0], policy_version=0)
    completions = await judge.generate(asked, sampling)
    to_judge = to_score(asked, completions)
    found, expected = [await scorer.prefill(to_judge, sampling) for scorer in (judge, reference)]
    assert_same(found, expected)
    assert (found.margins_T > 0).mean() <= FLIPS_SHARE_MAX
    assert np.abs(found.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX
    assert distances(found, completions).max() < PROOF_ERROR_MAX
    unseeded = [replace(request, seed=None, hidden=False) for request in to_judge]
    assert_same(*[await scorer.prefill(unseeded, sampling) for scorer in (judge, reference)])


async def test_a_claim_of_other_weights_is_far_from_its_numbers(judge: VllmScorer, policies: list[Weights]) -> None:
    await judge.load(policies[1], policy_version=1)
    completions = await judge.generate(requests(), SAMPLING)
    await judge.load(policies[0], policy_version=2)
    found = await judge.prefill(to_score(requests(), completions), SAMPLING)
    assert np.abs(found.logprobs_T - logprobs_of(completions)).mean() > 100 * LOGPROB_ERROR_MAX
    assert (found.margins_T > 0).mean() > 0.1


async def test_completions_that_begin_alike_and_turns_are_judged_each(
    judge: VllmScorer, reference: TransformersEngine, policies: list[Weights]
) -> None:
    """Whole blocks of such completions are in the prefix cache, so that vLLM forwards some of their tokens only once."""
    for scorer in (judge, reference):
        await scorer.load(policies[0], policy_version=0)
    rng = np.random.default_rng(0)
    tokens = tuple(rng.integers(0, 256, 120).tolist())
    alike = [ScoreRequest(tokens[:40], (*tokens[40:end], end), seed=end) for end in (41, 72, 73, 100, 100, 110)]
    same = [ScoreRequest(tokens[:40], tokens[40:110], seed=seed) for seed in (1, 2)]
    turns = [
        ScoreRequest(tokens[:10], tokens[10:50], seed=3),
        ScoreRequest(tokens[:70], tokens[70:90], seed=4),
        ScoreRequest(tokens[:100], tokens[100:118], seed=5),
    ]
    longer_prompt = [ScoreRequest(tokens[:90], tokens[90:105], seed=6), ScoreRequest(tokens[:1], tokens[1:2], seed=7)]
    to_judge = [replace(request, hidden=True) for request in [*turns, *alike, *same, *longer_prompt]]
    found, expected = [await scorer.prefill(to_judge, SAMPLING) for scorer in (judge, reference)]
    assert_same(found, expected)
    again = await judge.prefill(to_judge, SAMPLING)
    np.testing.assert_array_equal(again.logprobs_T, found.logprobs_T)


def lease_of(first_seed: int) -> Lease:
    groups = tuple(
        GroupAssignment(
            slot=slot,
            problem=Problem(environment="toy", index=slot),
            prompt_token_ids=tuple(range(60 + slot, 80 + slot)),
            seeds=tuple(range(first_seed + 8 * slot, first_seed + 8 * slot + 8)),
        )
        for slot in range(12)
    )
    return local_lease(groups, SAMPLING)


async def test_honest_bundles_of_the_same_build_are_accepted_and_those_of_rounded_weights_rejected(
    judge: VllmScorer, policies: list[Weights]
) -> None:
    """Calibrated on other tokens of the same engine."""
    engine_class = judge.info.calibration_class
    await judge.load(policies[0], policy_version=0)
    known = await measure_pair(judge, [lease_of(0)], await sample_honestly(judge, [lease_of(0)]))
    pair = PairMoments(worker=engine_class, validator=engine_class, moments=known.moments())
    calibration = Calibration(pairs=(pair,))
    policy = CheckPolicy(calibration=calibration)
    lease = lease_of(5_000)

    async def verdict(sampled: list[Rollouts]) -> Verdict:
        errors = await measure_pair(judge, [lease], sampled)
        found = {name: np.concatenate(parts) for name, parts in errors.values.items()}
        evidence = evidence_of(found, calibration, worker=engine_class, validator=engine_class)
        return verdict_on(summary(found), evidence, policy)

    assert (await verdict(await sample_honestly(judge, [lease]))).accepted
    rounded = mapped(policies[0], lambda values: quantised(values, group=values.shape[-1], largest=127))
    await judge.load(rounded, policy_version=1)
    claimed = await sample_honestly(judge, [lease])
    await judge.load(policies[0], policy_version=2)
    assert not (await verdict(claimed)).accepted


async def test_what_vllm_refuses_is_no_bug_of_this_software(judge: VllmScorer, policies: list[Weights]) -> None:
    """Before, a long one ended the role with a traceback, and a token that the model lacks ended vLLM's processes."""
    await judge.load(policies[0], policy_version=0)
    running = descendants(os.getpid())
    for prompt, why in (
        ((5, 10**6), "token 1000000 is none of the model's 264"),
        ((7,) * 200, "vLLM refuses a request"),
    ):
        with pytest.raises(EngineMismatch, match=why):
            await judge.generate([GenerateRequest(prompt, seed=0)], SAMPLING)
        with pytest.raises(EngineMismatch, match=why):
            await judge.prefill([ScoreRequest(prompt, (7, 8), seed=0)], SAMPLING)
    with pytest.raises(EngineMismatch, match="token 264 is none"):
        await judge.prefill([ScoreRequest((7,), (8, 264), seed=0)], SAMPLING)
    assert await judge.generate(requests(8), SAMPLING)
    assert descendants(os.getpid()) == running


@pytest.mark.timeout(600)
async def test_the_end_of_vllms_processes_ends_each_call_and_the_next_load_starts_new_ones(
    judge: VllmScorer, policies: list[Weights]
) -> None:
    # Upstream's calls of worker methods never end then, so a validator whose vLLM was killed judged nothing more.
    policy, other = policies
    for load_again in (False, True):
        await judge.load(policy, policy_version=0)
        engine_core = {pid for pid in descendants(os.getpid()) if b"resource_tracker" not in command_line(pid)}
        completions = await judge.generate(requests(), SAMPLING)
        asked = to_score(requests(), completions)
        found = await judge.prefill(asked, SAMPLING)
        assert np.abs(found.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX
        send(signal.SIGSTOP, engine_core)
        call = asyncio.ensure_future(
            judge.load(other, policy_version=1) if load_again else judge.prefill(asked, SAMPLING)
        )
        assert not (await asyncio.wait({call}, timeout=1))[0], "a stopped engine answers nothing"
        send(signal.SIGKILL, engine_core)
        with pytest.raises(EngineDied, match="processes ended"):
            await call


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def send(number: signal.Signals, pids: set[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
