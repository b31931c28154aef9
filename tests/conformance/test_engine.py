"""The contract of ports/engine.py, for every engine. vLLM is started once for the whole file.

The Scorer judges what the engines sampled: margin 0 means that a token is the one that its seed chooses.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.tiny_model import initial_weights, model_files
from prime_node.ports.engine import EngineMismatch, GenerateRequest, ScoreRequest
from prime_node.validator.spans import prefill_spans
from prime_protocol.assignment import Sampling
from prime_protocol.proof import PROOF_BYTES, compare_proofs, num_proofs
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.schedule import SwapPolicy
from prime_protocol.verify import Prefill
from prime_protocol.weights import Weights, WeightTensor

if TYPE_CHECKING:
    from prime_node.adapters.engines.vllm_engine import VllmEngine

FLIPS_SHARE_MAX = 0.005
"""Share of honest tokens that two engines may choose differently, both with fp32 arithmetic."""
LOGPROB_ERROR_MAX = 1e-3
"""Nats, for any single token, both with fp32 arithmetic."""
PROOF_ERROR_MAX = 0.5
"""Steps of bf16, for any single proof, both with fp32 arithmetic."""
STOP = 256
SAMPLING = Sampling(temperature=1.0, completion_tokens_max=12, stop_token_ids=(STOP, *range(40)))

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # Met when vLLM is imported and as its engine starts; neither is ours to mend.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
]


def peaked_weights(folder: Path, seed: int) -> Weights:
    """Random weights under which a model is sure of some tokens and the context matters, as in a trained one."""
    factors = {"lm_head.weight": 12.0, "model.embed_tokens.weight": 8.0}
    return {
        name: tensor if "norm" in name else scaled(tensor, factors.get(name, 4.0))
        for name, tensor in initial_weights(folder, seed).items()
    }


def scaled(tensor: WeightTensor, factor: float) -> WeightTensor:
    values = (tensor.data.astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
    return WeightTensor("bf16", tensor.shape, (values.view(np.uint32) >> 16).astype(np.uint16))


class DeafTransformers(TransformersEngine):
    """Can be told to ignore new weights, as engines have done silently."""

    deaf = False

    def _copy_weights(self, weights: Weights) -> None:
        if not self.deaf:
            super()._copy_weights(weights)


def deaf_vllm(folder: Path) -> VllmEngine:
    from prime_node.adapters.engines.vllm_engine import VllmEngine

    class DeafVllm(VllmEngine):
        deaf = False

        async def _swap(self, weights: Weights) -> None:
            if not self.deaf:
                await super()._swap(weights)

    return DeafVllm(folder, context_tokens_max=128)


Engine = DeafTransformers  # what the tests see: the port, and the switch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    for name, data in model_files(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128).items():
        (path / name).write_bytes(data)
    return path


@pytest.fixture(scope="module")
def policies(folder: Path) -> list[Weights]:
    return [peaked_weights(folder, seed) for seed in (1, 2)]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["transformers", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(300)])],
)
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Engine]:
    made = DeafTransformers(folder) if request.param == "transformers" else deaf_vllm(folder)
    yield made  # type: ignore[misc]
    await made.close()
    await made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorer(folder: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folder)
    yield made
    await made.close()


def requests(count: int = 96, *, first_seed: int = 1_000) -> list[GenerateRequest]:
    """Groups of eight; prompts share a beginning and differ in length."""
    prompts = [tuple(range(60, 80)) + tuple(range(100 + group, 100 + 2 * group + 1)) for group in range(12)]
    return [GenerateRequest(prompts[n // 8 % 12], seed=first_seed + n) for n in range(count)]


async def judged(
    scorer: TransformersEngine,
    weights: Weights,
    asked: Sequence[GenerateRequest],
    completions: Sequence[Completion],
    sampling: Sampling = SAMPLING,
) -> Prefill:
    await scorer.load(weights, policy_version=0)
    return await scorer.prefill(to_score(asked, completions), sampling)


def to_score(asked: Sequence[GenerateRequest], completions: Sequence[Completion]) -> list[ScoreRequest]:
    return [
        ScoreRequest(request.prompt_token_ids, completion.token_ids, request.seed, hidden=request.proofs)
        for request, completion in zip(asked, completions, strict=True)
    ]


def logprobs_of(completions: Sequence[Completion]) -> list[float]:
    return [nats for completion in completions for nats in completion.logprobs]


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


def distances(found: Prefill, completions: Sequence[Completion]) -> np.ndarray:
    """How far each completion's proofs are from the scorer's hidden states."""
    assert found.hidden_TD is not None
    proofs = np.frombuffer(b"".join(completion.proofs for completion in completions), np.uint8).reshape(-1, PROOF_BYTES)
    return compare_proofs(proofs, found.hidden_TD, [len(c.token_ids) for c in completions]).distance_mean_C


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
    # Tokens that are expected less than five times share a bin, as Pearson's test wants.
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
    sampling = Sampling(temperature=1.0, completion_tokens_max=64, stop_token_ids=(STOP,))
    for wait_s in (0.0, 0.2, 0.5, 1.0, 0.1):  # vLLM works in another process: until a swap met it at work
        await engine.load(policies[0], policy_version=0)
        under_way = asyncio.create_task(engine.generate(asked, sampling))
        await asyncio.sleep(wait_s)
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
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_vllm_swaps_a_model_with_a_tied_head_and_shared_keys(folder: Path, tmp_path: Path) -> None:
    # As in Qwen3-0.6B. Upstream leaves a tied head on the old weights on a CPU, and says nothing.
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"tie_word_embeddings": True, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    both = [peaked_weights(tmp_path, seed) for seed in (3, 4)]
    assert "lm_head.weight" not in both[0]
    engine, scorer = deaf_vllm(tmp_path), TransformersEngine(tmp_path)
    for version, weights in enumerate(both):
        await engine.load(weights, policy_version=version)
        completions = await engine.generate(requests(), SAMPLING)
        prefill = await judged(scorer, weights, requests(), completions)
        assert (prefill.margins_T > 0).mean() <= FLIPS_SHARE_MAX
        assert np.abs(prefill.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX
    await engine.close()
    await scorer.close()


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_an_unseeded_vllm_samples_by_itself_at_the_runs_temperature_and_with_its_filters(
    folder: Path, policies: list[Weights], scorer: TransformersEngine
) -> None:
    from prime_node.adapters.engines.vllm_engine import VllmEngine

    engine = VllmEngine(folder, context_tokens_max=128, seeded=False)
    assert not engine.info.seeded
    await engine.load(policies[0], policy_version=0)
    await scorer.load(policies[0], policy_version=0)
    for sampling in (SAMPLING, SAMPLING.model_copy(update={"temperature": 0.7, "top_k": 5})):
        asked = [replace(request, proofs=True) for request in requests()]
        completions = await engine.generate(asked, sampling)
        to_judge = [replace(request, seed=None) for request in to_score(asked, completions)]
        found, at_one = [await scorer.prefill(to_judge, how) for how in (sampling, SAMPLING)]
        assert found.margins_T.max() < 0.05, "no token outside the filters"
        assert np.abs(found.logprobs_T - logprobs_of(completions)).max() <= LOGPROB_ERROR_MAX
        assert distances(found, completions).max() < PROOF_ERROR_MAX
        deviations = [
            abs((each.logprobs_T - each.expected_T).sum()) / np.sqrt(each.variance_T.sum()) for each in (found, at_one)
        ]
        assert deviations[0] < 4
        assert (deviations[1] > 6) == (sampling != SAMPLING), "at another temperature they would be implausible"
    await engine.close()


START_AND_WAIT = """
import asyncio, pathlib, sys
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.adapters.engines.vllm_engine import VllmEngine

async def main():
    folder = pathlib.Path(sys.argv[1])
    engine = VllmEngine(folder, context_tokens_max=128)
    await engine.load(initial_weights(folder, 0), policy_version=0)
    print("loaded", flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_vllm_ends_with_the_process_that_started_it(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "start_and_wait.py"
    program.write_text(START_AND_WAIT)
    owner = await asyncio.create_subprocess_exec(
        sys.executable, str(program), str(folder), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert owner.stdout is not None
    while (line := await owner.stdout.readline()) != b"loaded\n":
        assert line, "it ended before it had loaded"
    started = [os.pidfd_open(pid) for pid in descendants(owner.pid)]
    assert started
    os.kill(owner.pid, signal.SIGKILL)
    await owner.wait()
    for ended in started:
        readable, _, _ = await asyncio.to_thread(select.select, [ended], [], [], 30)
        os.close(ended)
        assert readable, "a process of the engine is still running"


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [*children, *(other for child in children for other in descendants(child))]
