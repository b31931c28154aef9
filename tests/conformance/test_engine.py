"""The contract of ports/engine.py, for every engine. vLLM is started once for the whole file.

The Scorer judges what the engines sampled: margin 0 means that a token is the one that its seed chooses.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from tests.conformance.engine_world import (
    CONTEXT,
    FLIPS_SHARE_MAX,
    LOGPROB_ERROR_MAX,
    PROOF_ERROR_MAX,
    SAMPLING,
    STOP,
    DeafTransformers,
    Engine,
    deaf_vllm,
    distances,
    judged,
    logprobs_of,
    requests,
    to_score,
)
from tests.node.memory_coordinator import WorkerWorld
from tests.node.worker_world import make_run
from tests.time_world import be_slow, until

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.ports.engine import EngineMismatch, GenerateRequest, ScoreRequest
from prime_node.validator.spans import prefill_spans
from prime_node.worker.loop import run_worker
from prime_protocol.assignment import Sampling
from prime_protocol.limits import TEMPERATURE_MIN
from prime_protocol.noise import SEED_MAX
from prime_protocol.proof import PROOF_BYTES, num_proofs
from prime_protocol.rollout import FinishReason
from prime_protocol.schedule import SwapPolicy
from prime_protocol.weights import Weights, WeightTensor

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # They occur when vLLM is imported and when its engine starts; we can fix neither.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300)])],
)
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Engine]:
    made = DeafTransformers(folder) if request.param == "transformers" else deaf_vllm(folder)
    yield made
    await made.close()
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(folder: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folder)
    yield made
    await made.close()


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
async def test_seeds_choose_the_tokens_and_logprobs_are_those_of_the_policy_at_the_temperature(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights], temperature: float
) -> None:
    sampling = SAMPLING.model_copy(update={"temperature": temperature})
    await engine.load(policies[0], policy_version=0)
    completions = await engine.generate(requests(), sampling)
    prefill = await judged(scorer, policies[0], requests(), completions, sampling)
    assert len(prefill.margins_T) > 300
    assert (prefill.margins_T > 0).mean() <= FLIPS_SHARE_MAX
    assert np.abs(prefill.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX


async def test_it_computes_with_the_new_weights_where_only_a_part_of_a_layer_changed(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights]
) -> None:
    first, other = policies
    one_matrix = {**first, (name := "model.layers.1.self_attn.q_proj.weight"): other[name]}
    for version, weights in enumerate((first, one_matrix, other, first)):
        await engine.load(weights, policy_version=version)
        completions = await engine.generate(requests(), SAMPLING)
        prefill = await judged(scorer, weights, requests(), completions)
        assert (prefill.margins_T > 0).mean() <= FLIPS_SHARE_MAX
        assert np.abs(prefill.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX


@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 8, "min_p": 0.02}])
async def test_tokens_are_chosen_among_those_that_the_filters_let(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights], filters: dict[str, float]
) -> None:
    sampling = SAMPLING.model_copy(update=filters)
    await engine.load(policies[0], policy_version=0)
    completions = await engine.generate(requests(), sampling)
    plain = await engine.generate(requests(), SAMPLING)
    found, unlike = [await judged(scorer, policies[0], requests(), c, sampling) for c in (completions, plain)]
    assert (found.margins_T > 0).mean() <= FLIPS_SHARE_MAX
    assert found.stop_margins_T is not None
    assert found.stop_margins_T.max() <= found.margins_T.max() < 0.05
    assert np.abs(found.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX, "of the whole vocabulary"
    assert (unlike.margins_T > 0.1).mean() > 0.02


EXTREMES: list[dict[str, object]] = [
    {"temperature": TEMPERATURE_MIN},
    {"temperature": 10.0, "top_k": 2**24},
    {"top_p": 5e-324},
    {"top_p": 1 - 2**-53, "top_k": 1},
    {"min_p": 5e-324},
    {"min_p": 1.0, "top_p": 0.5},
    {"stop_token_ids": tuple(range(200, 264)), "completion_tokens_max": 1},
]


@pytest.mark.parametrize("update", EXTREMES, ids=str)
async def test_no_sampling_that_a_run_may_sign_gives_a_logprob_that_is_no_number(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights], update: dict[str, object]
) -> None:
    sampling = Sampling.model_validate({**SAMPLING.model_dump(), **update})
    asked = [replace(request, seed=seed) for request in requests(8) for seed in (0, SEED_MAX)]
    await engine.load(policies[0], policy_version=0)
    completions = await engine.generate(asked, sampling)
    found = await judged(scorer, policies[0], asked, completions, sampling)
    errors = np.abs(found.logprobs_T - logprobs_of(completions)) * min(1.0, sampling.temperature)
    assert errors.max() <= LOGPROB_ERROR_MAX
    assert found.margins_T.max() * min(1.0, sampling.temperature) < 0.05


async def test_the_same_seeds_give_the_same_tokens_and_other_seeds_give_others(
    engine: Engine, policies: list[Weights]
) -> None:
    await engine.load(policies[0], policy_version=0)
    first, again = [await engine.generate(requests(), SAMPLING) for _ in range(2)]
    other = await engine.generate(requests(first_seed=5_000), SAMPLING)
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    assert sum(a.token_ids == b.token_ids for a, b in zip(first, other, strict=True)) < len(first) / 10


async def test_completions_come_in_the_order_of_the_requests(engine: Engine, policies: list[Weights]) -> None:
    await engine.load(policies[0], policy_version=0)
    forth = await engine.generate(requests(), SAMPLING)
    back = await engine.generate(requests()[::-1], SAMPLING)
    differing = sum(a.token_ids != b.token_ids for a, b in zip(forth, back[::-1], strict=True))
    assert differing <= 1  # another order is another batch, so a numerical tie may break otherwise


async def test_a_completion_ends_with_its_first_stop_token_or_at_the_limit(
    engine: Engine, policies: list[Weights]
) -> None:
    await engine.load(policies[0], policy_version=0)
    completions = await engine.generate(requests(), SAMPLING)
    for completion in completions:
        stops = [token in SAMPLING.stop_token_ids for token in completion.token_ids]
        assert not any(stops[:-1])
        assert completion.finish is (FinishReason.STOP if stops[-1] else FinishReason.LENGTH)
        assert stops[-1] or len(stops) == SAMPLING.completion_tokens_max
        assert len(completion.logprobs) == len(completion.token_ids)
        assert all(nats <= 0.0 for nats in completion.logprobs)
    assert {completion.finish for completion in completions} == set(FinishReason)


async def test_completions_commit_to_the_hidden_states_that_their_tokens_come_from(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights]
) -> None:
    asked = [replace(request, proofs=True) for request in requests(80)]
    sampling = Sampling(temperature=1.0, completion_tokens_max=80, stop_token_ids=(STOP, *range(3)))
    await engine.load(policies[0], policy_version=0)
    completions = await engine.generate(asked, sampling)
    assert max(len(c.token_ids) for c in completions) > 64 > 32 > min(len(c.token_ids) for c in completions)
    assert all(len(c.proofs) == PROOF_BYTES * num_proofs([len(c.token_ids)]) for c in completions)
    honest = distances(await judged(scorer, policies[0], asked, completions, sampling), completions)
    other = distances(await judged(scorer, policies[1], asked, completions, sampling), completions)
    assert honest.max() < PROOF_ERROR_MAX < 10 < other.min()
    plain = await engine.generate([replace(request, proofs=False) for request in asked], sampling)
    assert {c.proofs for c in plain} == {b""}


async def test_a_limit_of_one_token_gives_one_token(engine: Engine, policies: list[Weights]) -> None:
    await engine.load(policies[0], policy_version=0)
    one = SAMPLING.model_copy(update={"completion_tokens_max": 1})
    completions = await engine.generate(requests(8), one)
    longer = await engine.generate(requests(8), SAMPLING)
    assert [c.token_ids for c in completions] == [c.token_ids[:1] for c in longer]


async def test_temperature_zero_is_greedy_with_logprobs_at_temperature_one(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights]
) -> None:
    greedy = SAMPLING.model_copy(update={"temperature": 0.0})
    await engine.load(policies[0], policy_version=0)
    completions = await engine.generate(requests(), greedy)
    other_seeds = await engine.generate(requests(first_seed=9_000), greedy)
    prefill = await judged(scorer, policies[0], requests(), completions, greedy)
    at_one = await judged(scorer, policies[0], requests(), completions, SAMPLING)
    assert [c.token_ids for c in completions] == [c.token_ids for c in other_seeds]
    assert (prefill.margins_T > 0).mean() <= FLIPS_SHARE_MAX
    assert np.abs(at_one.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX


async def test_sampling_draws_from_the_softmax(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights]
) -> None:
    prompt, draws = tuple(range(60, 90)), 4_000
    one = Sampling(temperature=1.0, completion_tokens_max=1, stop_token_ids=())
    await engine.load(policies[0], policy_version=0)
    completions = await engine.generate([GenerateRequest(prompt, seed) for seed in range(draws)], one)
    await scorer.load(policies[0], policy_version=0)
    every_token = [ScoreRequest(prompt, (token,), 0) for token in range(264)]
    expected = np.exp((await scorer.prefill(every_token, one)).logprobs_T.astype(np.float64)) * draws
    assert expected.sum() == pytest.approx(draws, rel=1e-4)
    counts = Counter(completion.token_ids[0] for completion in completions)
    seen = np.array([counts[token] for token in range(264)], dtype=np.float64)
    # Tokens with fewer than five expected draws share a bin, as Pearson's test requires.
    common = expected >= 5
    seen, expected = (np.append(x[common], x[~common].sum()) for x in (seen, expected))
    chi_square = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(seen) - 1
    assert freedom >= 10
    assert abs(chi_square - freedom) < 4 * math.sqrt(2 * freedom)


async def test_a_load_changes_the_policy_and_another_brings_it_back(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights]
) -> None:
    outputs = []
    for version, weights in enumerate([policies[0], policies[1], policies[0]]):
        await engine.load(weights, policy_version=version)
        outputs.append(await engine.generate(requests(), SAMPLING))
        prefill = await judged(scorer, weights, requests(), outputs[-1])
        assert np.abs(prefill.logprobs_T - logprobs_of(outputs[-1])).max() <= LOGPROB_ERROR_MAX
    tokens = [[c.token_ids for c in output] for output in outputs]
    assert tokens[0] == tokens[2]
    assert sum(a == b for a, b in zip(tokens[0], tokens[1], strict=True)) < len(tokens[0]) / 10


async def test_loading_the_same_weights_again_changes_nothing(engine: Engine, policies: list[Weights]) -> None:
    await engine.load(policies[0], policy_version=0)
    before = await engine.generate(requests(), SAMPLING)
    await engine.load(policies[0], policy_version=0)
    assert await engine.generate(requests(), SAMPLING) == before


async def test_a_load_that_does_nothing_is_found_out(engine: Engine, policies: list[Weights]) -> None:
    await engine.load(policies[0], policy_version=0)
    engine.deaf = True
    try:
        with pytest.raises(EngineMismatch, match="policy 1"):
            await engine.load(policies[1], policy_version=1)
        with pytest.raises(AssertionError, match="no weights"):
            await engine.generate(requests(1), SAMPLING)
    finally:
        engine.deaf = False
    await engine.load(policies[1], policy_version=1)
    assert len(await engine.generate(requests(1), SAMPLING)) == 1


async def test_weights_of_another_model_are_refused(engine: Engine, policies: list[Weights]) -> None:
    await engine.load(policies[0], policy_version=0)
    before = await engine.generate(requests(8), SAMPLING)
    for name, change in (("model.norm.weight", None), ("lm_head.weight", policies[0]["model.norm.weight"])):
        broken = {key: tensor for key, tensor in {**policies[0], name: change}.items() if tensor is not None}
        with pytest.raises(ValueError, match=name):
            await engine.load(broken, policy_version=1)
    assert await engine.generate(requests(8), SAMPLING) == before


@pytest.mark.parametrize("then_load", [False, True])
async def test_a_cancelled_call_leaves_the_engine_usable(
    engine: Engine, policies: list[Weights], then_load: bool
) -> None:
    await engine.load(policies[0], policy_version=0)
    before = await engine.generate(requests(8), SAMPLING)
    endless = Sampling(temperature=1.0, completion_tokens_max=90, stop_token_ids=())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.generate(requests(), endless), timeout=0.02)
    if then_load:
        await engine.load(policies[0], policy_version=0)
    assert await engine.generate(requests(8), SAMPLING) == before


async def test_info_names_the_software(engine: Engine) -> None:
    assert engine.info.name in ("transformers", "vllm")
    assert engine.info.version[0].isdigit()
    assert (engine.info.dtype, engine.info.device) in {("fp32", "cpu"), ("bf16", "cuda")}


@pytest.mark.parametrize("swap", [swap for swap in SwapPolicy if swap.spans_policies])
async def test_a_swap_under_way_cuts_each_completion_where_its_spans_say(
    engine: Engine, scorer: TransformersEngine, policies: list[Weights], swap: SwapPolicy
) -> None:
    """Each part is what its own policy samples, by the assigned seed, with keys and values as the swap promises."""
    if swap not in engine.swaps:
        pytest.skip(f"this engine does not offer {swap.value}")
    asked = [replace(request, proofs=True) for request in requests(48)]
    # Not 1: vLLM samples the probe at 1 while these completions continue.
    sampling = Sampling(temperature=0.7, completion_tokens_max=64, stop_token_ids=(STOP,))
    for wait_s in (0.0, 0.2, 0.5, 1.0, 0.1):  # vLLM works in another process: until a swap met it at work
        await engine.load(policies[0], policy_version=0)
        under_way = asyncio.create_task(engine.generate(asked, sampling))
        await be_slow(wait_s)
        await engine.update(policies[1], policy_version=1, swap=swap)
        completions = await under_way
        spans = [each.spans or ((0, len(each.token_ids)),) for each in completions]
        if any(len(each) == 2 for each in spans):
            break
    assert any(len(each) == 2 for each in spans), "the swap cut nothing"
    scored = to_score(asked, completions)
    named = dict(enumerate(policies))
    found = await prefill_spans(scorer, scored, spans, sampling, named, swap=swap)
    claimed_T = np.array([nats for completion in completions for nats in completion.logprobs])
    assert np.abs(found.logprobs_T - claimed_T).max() < LOGPROB_ERROR_MAX
    assert (found.margins_T > 0).mean() <= FLIPS_SHARE_MAX
    assert distances(found, completions).max() < PROOF_ERROR_MAX
    assert [sum(num for _, num in each) for each in spans] == [len(each.token_ids) for each in completions]
    again = await engine.generate(asked[:8], sampling)
    assert all(each.spans == () for each in again), "from now on it is policy 1's"


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
async def test_vllm_finds_out_a_missed_update_that_is_too_small_for_logprobs(
    engine: Engine, policies: list[Weights]
) -> None:
    bits = policies[0]["lm_head.weight"].data.copy()
    bits[::100] ^= 1  # the last bit of one weight in a hundred
    nudged = {**policies[0], "lm_head.weight": WeightTensor("bf16", policies[0]["lm_head.weight"].shape, bits)}
    await engine.load(policies[0], policy_version=0)
    engine.deaf = True
    try:
        with pytest.raises(EngineMismatch, match="exactly as before"):
            await engine.load(nudged, policy_version=1)
    finally:
        engine.deaf = False
    await engine.load(nudged, policy_version=1)


@pytest.mark.vllm
@pytest.mark.timeout(300)
@pytest.mark.parametrize("engine", ["vllm"], indirect=True)
async def test_vllm_stops_within_a_cancelled_lease_which_returns(
    engine: Engine, policies: list[Weights], tmp_path: Path
) -> None:
    """A worker of a real run, whose coordinator says that it can no longer use the lease. All completions are endless."""
    endless = Sampling(completion_tokens_max=CONTEXT - 8, stop_token_ids=())
    pinned = make_run(heartbeat_seconds=50.0, sampling=endless, vocab_size=264)
    world = WorkerWorld(tmp_path, pinned=pinned, policies=0)
    world.coordinator.publish_policy(policies[0])
    world.coordinator.leases_max = 1
    working = asyncio.create_task(run_worker(world.worker(engine), world.stop))
    await until(lambda: world.coordinator.leases, seconds=200.0)
    while len(sampled := await engine.lengths()) < 8 or min(sampled) < 2:  # type: ignore[attr-defined]
        assert not working.done()
    (lease,) = world.coordinator.leases
    world.coordinator.cancels.add(lease)
    await until(lambda: world.coordinator.returned)
    while now := await engine.lengths():  # type: ignore[attr-defined]
        sampled = now
    assert max(sampled) < endless.completion_tokens_max / 2, "they were aborted, not finished"
    assert len(await engine.generate(requests(1), SAMPLING)) == 1
    assert world.coordinator.returned == [lease]
    world.stop.set()
    await working
    assert world.coordinator.verdicts == {}
