"""Completions that span policies: the transformers engine swaps weights meanwhile, and a validator judges each span alone."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.builder import build_lease
from tests.node.validator_world import judge_bundle
from tests.node.worker_world import WORKER, make_run
from tests.tiny_model_world import write_tiny_model

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.ports.engine import EngineMismatch, GenerateRequest, ScoreRequest, Spans
from prime_node.ports.environment import HeldOutProblem
from prime_node.validator.judge import Judgement, OpenedBundle, open_bundle
from prime_node.validator.spans import policies_of, prefill_spans
from prime_node.validator.spans import spans_of as spans_in
from prime_node.worker.generating import bundle_for, generate
from prime_node.worker.loaded_policy import LoadedPolicy
from prime_protocol.assignment import GroupAssignment, Lease, Problem, Sampling
from prime_protocol.digest import digest_of
from prime_protocol.rollout import Completion, EngineInfo, Rollouts, rollouts_for
from prime_protocol.run_spec import PinnedRun
from prime_protocol.schedule import SwapPolicy
from prime_protocol.verdict import RejectReason
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights

SAMPLING = Sampling(temperature=1.0, completion_tokens_max=48, stop_token_ids=(3,))
REQUESTS = [GenerateRequest((7, *range(50, 58 + n // 4)), seed=n) for n in range(12)]
SPANNING = [swap for swap in SwapPolicy if swap.spans_policies]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model"), hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64
    )


@pytest.fixture(scope="module")
def policies(folder: Path) -> dict[int, Weights]:
    """Return three policies that differ a lot."""
    return {version: initial_weights(folder, version) for version in range(3)}


@pytest.fixture
async def engine(folder: Path, policies: dict[int, Weights]) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folder)
    await made.load(policies[0], policy_version=0)
    yield made
    await made.close()


async def swapped(engine: TransformersEngine, policies: dict[int, Weights], swap: SwapPolicy) -> list[Completion]:
    """Sample twelve completions while policy 1 arrives."""
    generating = asyncio.create_task(engine.generate(REQUESTS, SAMPLING))
    await asyncio.sleep(0)
    await engine.update(policies[1], policy_version=1, swap=swap)
    return await generating


def spans_of(completion: Completion) -> Spans:
    return completion.spans or ((0, len(completion.token_ids)),)


async def judged(
    engine: TransformersEngine, policies: dict[int, Weights], completions: list[Completion], swap: SwapPolicy
) -> tuple[float, float]:
    """Return the largest error of a logprob, and the share of tokens that the seeds do not choose."""
    requests = [
        ScoreRequest(asked.prompt_token_ids, completion.token_ids, asked.seed)
        for asked, completion in zip(REQUESTS, completions, strict=True)
    ]
    spans = [spans_of(completion) for completion in completions]
    named = {version: policies[version] for version in {version for each in spans for version, _ in each}}
    found: Prefill = await prefill_spans(engine, requests, spans, SAMPLING, named, swap=swap)
    claimed_T = np.array([nats for completion in completions for nats in completion.logprobs])
    return float(np.abs(found.logprobs_T - claimed_T).max()), float((found.margins_T > 0).mean())


@pytest.mark.parametrize("swap", SPANNING)
async def test_each_span_is_what_its_own_policy_samples(
    engine: TransformersEngine, policies: dict[int, Weights], swap: SwapPolicy
) -> None:
    completions = await swapped(engine, policies, swap)
    assert {version for completion in completions for version, _ in spans_of(completion)} == {0, 1}
    for completion in completions:
        assert sum(num_tokens for _, num_tokens in spans_of(completion)) == len(completion.token_ids)
    error, flips = await judged(engine, policies, completions, swap)
    assert error < 1e-4
    assert flips <= 0.01


async def test_a_kept_cache_is_a_mixture_that_no_forward_pass_of_one_policy_explains(
    engine: TransformersEngine, policies: dict[int, Weights]
) -> None:
    completions = await swapped(engine, policies, SwapPolicy.KEEP_KV)
    error, _ = await judged(engine, policies, completions, SwapPolicy.KEEP_AND_RECOMPUTE)
    assert error > 0.01
    again = await swapped(engine, policies, SwapPolicy.KEEP_AND_RECOMPUTE)
    error, _ = await judged(engine, policies, again, SwapPolicy.KEEP_KV)
    assert error > 0.01


async def test_a_false_cut_or_policy_is_detected(engine: TransformersEngine, policies: dict[int, Weights]) -> None:
    completions = await swapped(engine, policies, SwapPolicy.ABORT_AND_RESUME)
    place = next(index for index, completion in enumerate(completions) if len(completion.spans) == 2)
    honest = completions[place]
    (_, before), (_, after) = honest.spans
    lies: list[Spans] = [((0, before + after),), ((1, before + after),), ((0, before), (2, after))]
    lies += [((0, before + 1), (1, after - 1))] if after > 1 else []
    for lie in lies:
        claimed = [*completions[:place], replace(honest, spans=lie), *completions[place + 1 :]]
        error, _ = await judged(engine, policies, claimed, SwapPolicy.ABORT_AND_RESUME)
        assert error > 0.01, lie


async def test_an_update_without_work_is_a_load(engine: TransformersEngine, policies: dict[int, Weights]) -> None:
    await engine.update(policies[1], policy_version=1, swap=SwapPolicy.KEEP_KV)
    updated = await engine.generate(REQUESTS, SAMPLING)
    await engine.load(policies[1], policy_version=1)
    assert updated == await engine.generate(REQUESTS, SAMPLING)
    assert all(completion.spans == () for completion in updated)


async def test_a_swap_that_fails_ends_the_generation_too(
    engine: TransformersEngine, policies: dict[int, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "copy_weights", lambda weights: None)
    generating = asyncio.create_task(engine.generate(REQUESTS, SAMPLING))
    await asyncio.sleep(0)
    with pytest.raises(EngineMismatch):
        await engine.update(policies[1], policy_version=1, swap=SwapPolicy.KEEP_KV)
    with pytest.raises(EngineMismatch):
        await generating


# From the lease to the verdict


class Lengths:
    """Environment that implements ports.environment.Environment: the reward is the number of characters."""

    def __init__(self, fails_on: int | None = None) -> None:
        self.fails_on, self.scored = fails_on, 0

    def prompt(self, index: int) -> str:
        return " ".join(str(token) for token in REQUESTS[4 * index].prompt_token_ids)

    def score(self, index: int, completion: str, *, finished: bool) -> float:
        self.scored += 1
        if self.fails_on is not None and self.scored % self.fails_on == 0:
            raise ZeroDivisionError("no such thing")
        return float(len(completion))

    def answer(self, index: int) -> str:
        return ""

    def held_out(self, count: int) -> list[HeldOutProblem]:
        return []


class Letters:
    """Tokenizer that implements ports.environment.Tokenizer, except `encode`: prompts are numbers of tokens."""

    vocab_size, stop_token_id = 264, 3

    def encode_prompt(self, text: str) -> list[int]:
        return [int(token) for token in text.split()]

    def encode(self, text: str) -> list[int]:
        return [7]

    def decode(self, token_ids: list[int]) -> str:
        return "x" * len(token_ids)


def run_with(**schedule: object) -> PinnedRun:
    return make_run(
        vocab_size=264, rollouts_per_group=4, sampling=SAMPLING, async_level=2, schedule=schedule, groups_per_step=3
    )


def lease_of(run: PinnedRun, environment: str) -> Lease:
    groups = [
        GroupAssignment(
            slot=slot,
            problem=Problem(environment=environment, index=slot),
            prompt_token_ids=REQUESTS[4 * slot].prompt_token_ids,
            seeds=tuple(range(4 * slot, 4 * slot + 4)),
        )
        for slot in range(3)
    ]
    return build_lease(run, WORKER, groups, sampling=SAMPLING)


async def generated(
    engine: TransformersEngine, lease: Lease, policies: dict[int, Weights], swap: SwapPolicy
) -> tuple[Rollouts | None, int]:
    """Return the rollouts and the policy held then: policy 1 is available at once, policy 2 never arrives."""

    async def newer(version: int) -> tuple[int, Weights]:
        if version >= 1:
            await asyncio.Event().wait()
        return 1, policies[1]

    loaded = LoadedPolicy(0)
    return (await generate(engine, lease, swap, loaded=loaded, wait_newer=newer)).rollouts, loaded.version


async def nothing_newer(version: int) -> tuple[int, Weights]:
    await asyncio.Event().wait()
    raise AssertionError


def with_spans(rollouts: Rollouts) -> list[Completion]:
    pairs = zip(rollouts.completions(), spans_in(rollouts), strict=True)
    return [replace(completion, spans=spans) for completion, spans in pairs]


async def verdict_on(
    engine: TransformersEngine,
    run: PinnedRun,
    lease: Lease,
    completions: list[Completion],
    policies: dict[int, Weights],
    *,
    newest_policy: int | None = 1,
    environment: Lengths | None = None,
) -> Judgement:
    info = EngineInfo(name="transformers", version="1", dtype="fp32", device="cpu")
    digest = digest_of(lease.model_dump_json().encode())
    parcel = bundle_for(
        lease, rollouts_for(lease, completions), key=WORKER, engine=info, created_at_ms=0, lease_digest=digest
    )
    opened = open_bundle(parcel, lease, run, newest_policy=newest_policy)
    if not isinstance(opened, OpenedBundle):
        return opened
    versions = policies_of(opened.rollouts)
    if len(versions) == 1:
        await engine.load(policies[versions[0]], policy_version=versions[0])
    (name,) = {group.problem.environment for group in lease.groups}
    return await judge_bundle(
        opened,
        engine,
        run=run,
        environments={name: environment or Lengths()},
        tokenizer=Letters(),
        policies=policies if len(versions) > 1 else None,
    )


@pytest.mark.parametrize("swap", SPANNING)
async def test_what_a_worker_swaps_under_way_a_validator_accepts(
    engine: TransformersEngine, policies: dict[int, Weights], swap: SwapPolicy
) -> None:
    run = run_with(swap=swap)
    lease = lease_of(run, run.spec.environments[0].name)
    rollouts, held = await generated(engine, lease, policies, swap)
    assert held == 1
    assert rollouts is not None
    assert any(len(spans) == 2 for spans in spans_in(rollouts))
    two = {version: policies[version] for version in (0, 1)}
    judgement = await verdict_on(engine, run, lease, with_spans(rollouts), two)
    assert judgement.verdict.accepted, judgement
    assert len(judgement.versions) == 3
    assert all(0 <= oldest <= end <= 1 for oldest, end in judgement.versions)


async def test_spans_are_refused_where_the_run_drains_and_where_they_go_back_or_ahead(
    engine: TransformersEngine, policies: dict[int, Weights]
) -> None:
    resuming, draining = run_with(swap="abort_and_resume"), run_with()
    name = resuming.spec.environments[0].name
    lease = lease_of(resuming, name)
    rollouts, _ = await generated(engine, lease, policies, SwapPolicy.ABORT_AND_RESUME)
    assert rollouts is not None
    made = with_spans(rollouts)
    long = next(index for index, completion in enumerate(made) if len(completion.token_ids) > 2)
    num = len(made[long].token_ids)
    bad: list[Spans] = [((0, 1), (2, num - 1)), ((1, 1), (0, num - 1)), ((1, 1), (1, num - 1))]
    for spans in bad:
        claimed = [*made[:long], replace(made[long], spans=spans), *made[long + 1 :]]
        judgement = await verdict_on(engine, resuming, lease, claimed, policies)
        assert judgement.verdict.reason is RejectReason.WRONG_POLICY, spans
    lease = lease_of(draining, name)
    judgement = await verdict_on(engine, draining, lease, made, policies)
    assert judgement.verdict.reason is RejectReason.WRONG_POLICY


async def test_a_lease_that_waited_its_turn_is_begun_on_the_policy_that_is_held(
    engine: TransformersEngine, policies: dict[int, Weights]
) -> None:
    run = run_with(swap="abort_and_resume")
    lease = lease_of(run, run.spec.environments[0].name)
    await engine.load(policies[1], policy_version=1)
    made = await generate(engine, lease, SwapPolicy.ABORT_AND_RESUME, loaded=LoadedPolicy(1), wait_newer=nothing_newer)
    assert made.rollouts is not None
    assert (made.rollouts.spans_S3[:, 1] == 1).all()
    judgement = await verdict_on(engine, run, lease, with_spans(made.rollouts), policies)
    assert judgement.verdict.accepted
    assert judgement.versions == ((1, 1),) * 3


async def test_abort_and_requeue_hands_the_lease_back(engine: TransformersEngine, policies: dict[int, Weights]) -> None:
    lease = lease_of(run_with(), "any")
    assert await generated(engine, lease, policies, SwapPolicy.ABORT_AND_REQUEUE) == (None, 0)
    assert len(await engine.generate(REQUESTS, SAMPLING)) == len(REQUESTS), "and the engine goes on"


# Environments that fail


async def test_a_group_is_trained_on_from_a_minimum_of_scored_completions(
    engine: TransformersEngine, policies: dict[int, Weights]
) -> None:
    run = run_with(group_rollouts_min=3)
    lease = lease_of(run, run.spec.environments[0].name)
    made = await engine.generate(REQUESTS, SAMPLING)
    judgement = await verdict_on(engine, run, lease, made, policies, environment=Lengths(fails_on=4))
    assert judgement.verdict.accepted
    assert judgement.unscored == (3, 7, 11)
    assert [judgement.rewards[index] for index in judgement.unscored] == [0.0] * 3


@pytest.mark.parametrize(("minimum", "fails_on"), [(None, 12), (3, 2), (1, 1)])
async def test_an_environment_that_fails_too_often_is_named_and_is_nobodys_fault(
    engine: TransformersEngine, policies: dict[int, Weights], minimum: int | None, fails_on: int
) -> None:
    run = run_with(group_rollouts_min=minimum)
    name = run.spec.environments[0].name
    lease = lease_of(run, name)
    made = await engine.generate(REQUESTS, SAMPLING)
    judgement = await verdict_on(engine, run, lease, made, policies, environment=Lengths(fails_on=fails_on))
    assert judgement.verdict.reason is RejectReason.UNVERIFIABLE
    assert f"environment {name} cannot score" in judgement.verdict.detail


async def test_a_reward_that_is_no_number_is_no_reward(
    engine: TransformersEngine, policies: dict[int, Weights]
) -> None:
    class Divides(Lengths):
        def score(self, index: int, completion: str, *, finished: bool) -> float:
            return float("nan") if super().score(index, completion, finished=finished) else math.inf

    run = run_with(group_rollouts_min=1)
    made = await engine.generate(REQUESTS, SAMPLING)
    lease = lease_of(run, run.spec.environments[0].name)
    judgement = await verdict_on(engine, run, lease, made, policies, environment=Divides())
    assert judgement.verdict.reason is RejectReason.UNVERIFIABLE
    assert judgement.rewards == ()
