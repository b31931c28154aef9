"""Engines without the assigned randomness: whether a run accepts them, and what remains verifiable."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tests.conformance.engine_world import peaked_weights
from tests.node.proofs_world import LEASE
from tests.node.validator_world import LeasedPrompts, LetterTokenizer, judge_bundle, make_bundle
from tests.node.worker_world import make_run
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.ports.engine import GenerateRequest, ScoreRequest
from prime_node.validator.judge import Judgement, OpenedBundle, open_bundle
from prime_protocol.assignment import Sampling
from prime_protocol.calibration import Calibration, PairMoments
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.evidence import Moments
from prime_protocol.rollout import Rollouts, rollouts_for
from prime_protocol.run_spec import PinnedRun
from prime_protocol.verdict import RejectReason

RUN = make_run(vocab_size=264, sampling=LEASE.sampling, checks=CheckPolicy(unseeded=True))


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncIterator[TransformersEngine]:
    write_tiny_model(tmp_path, hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128)
    made = TransformersEngine(tmp_path)
    await made.load(peaked_weights(tmp_path, 0), policy_version=0)
    yield made
    await made.close()


async def sampled(
    engine: TransformersEngine, sampling: Sampling = LEASE.sampling, *, rescored: bool = True
) -> Rollouts:
    """Sample with unassigned seeds; the logprobs are those of the run's own sampling."""
    prompts = [group.prompt_token_ids for group in LEASE.groups for _ in group.seeds]
    asked = [GenerateRequest(prompt, seed=7_000 + n) for n, prompt in enumerate(prompts)]
    rollouts = rollouts_for(LEASE, await engine.generate(asked, sampling))
    if not rescored:
        return rollouts
    to_score = [ScoreRequest(p, c.token_ids, 0) for p, c in zip(prompts, rollouts.completions(), strict=True)]
    return replace(rollouts, logprobs_T=(await engine.prefill(to_score, LEASE.sampling)).logprobs_T)


async def judge(
    engine: TransformersEngine, rollouts: Rollouts, run: PinnedRun = RUN, *, seeded: bool = False
) -> Judgement:
    info = engine.info.model_copy(update={"seeded": seeded})
    opened = open_bundle(make_bundle(LEASE, rollouts, engine=info), LEASE, run)
    if not isinstance(opened, OpenedBundle):
        return opened
    toys = {"toy": LeasedPrompts(LEASE)}
    return await judge_bundle(opened, engine, run=run, environments=toys, tokenizer=LetterTokenizer())


async def test_honest_samples_without_the_seeds_are_accepted_where_the_run_takes_them(
    engine: TransformersEngine,
) -> None:
    judgement = await judge(engine, await sampled(engine, rescored=False))
    assert judgement.verdict.accepted
    assert 0 < judgement.measured["choice_deviation"] < 4
    refused = await judge(engine, await sampled(engine), make_run(vocab_size=264, sampling=LEASE.sampling))
    assert refused.verdict.reason is RejectReason.MALFORMED
    seeded = await judge(engine, await sampled(engine), seeded=True)
    assert seeded.verdict.reason is RejectReason.SEED_MISMATCH, "who says that he took the seeds is held to them"


@pytest.mark.parametrize("temperature", [0.0, 0.3, 4.0])
async def test_greedy_choice_and_other_temperatures_are_found_out_even_with_the_right_logprobs(
    engine: TransformersEngine, temperature: float
) -> None:
    other = LEASE.sampling.model_copy(update={"temperature": temperature})
    judgement = await judge(engine, await sampled(engine, other))
    assert judgement.verdict.reason is RejectReason.IMPLAUSIBLE


async def test_tokens_that_the_filters_exclude_are_found_out(engine: TransformersEngine) -> None:
    few = LEASE.sampling.model_copy(update={"top_k": 4})
    plain = await sampled(engine)
    prompts = [group.prompt_token_ids for group in LEASE.groups for _ in group.seeds]
    scored = [ScoreRequest(p, c.token_ids, None) for p, c in zip(prompts, plain.completions(), strict=True)]
    found = await engine.prefill(scored, few)
    assert (found.margins_T > 0).mean() > 0.5
    assert found.expected_T is not None
    assert (await engine.prefill(scored, LEASE.sampling)).margins_T.max() == 0


async def test_without_seeds_margins_are_no_evidence_for_or_against(engine: TransformersEngine) -> None:
    moments = Moments(cap=1.0, lambdas=(1.0,), log_moments=(0.001,), num_tokens=1_000)
    of_class = engine.info.calibration_class
    names = ("margin", "flip", "stop", "logprob", "sharper", "flatter")
    pair = PairMoments(worker=of_class, validator=of_class, moments=dict.fromkeys(names, moments))
    checks = CheckPolicy(unseeded=True, calibration=Calibration(pairs=(pair,)))
    run = make_run(vocab_size=264, sampling=LEASE.sampling, checks=checks)
    judgement = await judge(engine, await sampled(engine, rescored=False), run)
    assert judgement.evidence is not None
    assert set(judgement.evidence.sums) == {"logprob", "sharper", "flatter"}


async def test_a_greedy_choice_needs_no_seed(engine: TransformersEngine) -> None:
    greedy = LEASE.sampling.model_copy(update={"temperature": 0.0})
    lease = LEASE.model_copy(update={"sampling": greedy})
    run = make_run(vocab_size=264, sampling=greedy, checks=CheckPolicy(unseeded=True))
    info = engine.info.model_copy(update={"seeded": False})
    rollouts = await sampled(engine, greedy, rescored=False)
    for made, reason in ((rollouts, None), (await sampled(engine, rescored=False), RejectReason.SEED_MISMATCH)):
        opened = open_bundle(make_bundle(lease, made, engine=info), lease, run)
        assert isinstance(opened, OpenedBundle)
        toys = {"toy": LeasedPrompts(LEASE)}
        judgement = await judge_bundle(opened, engine, run=run, environments=toys, tokenizer=LetterTokenizer())
        assert judgement.verdict.reason is reason
