"""Properties of the transformers engine alone: bounded memory, other architectures, and its work as a Scorer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.tiny_model_world import write_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from prime_node.adapters.engines.torch_weights import to_weights
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.causal_model import common_prefix
from prime_node.adapters.models.tiny_model import initial_weights
from prime_node.ports.engine import EngineMismatch, GenerateRequest, ScoreRequest
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion
from prime_protocol.weights import Weights, WeightTensor

SAMPLING = Sampling(temperature=1.0, completion_tokens_max=10, stop_token_ids=tuple(range(40)))
REQUESTS = [GenerateRequest((7, *range(50, 60 + n // 4 * 3)), seed=n) for n in range(24)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, hidden_size=32, num_layers=2, num_heads=2, intermediate_size=64)


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[TransformersEngine]:
    made = TransformersEngine(folder)
    await made.load(initial_weights(folder, 0), policy_version=0)
    yield made
    await made.close()


def score_requests(completions: list[Completion]) -> list[ScoreRequest]:
    return [
        ScoreRequest(request.prompt_token_ids, completion.token_ids, request.seed)
        for request, completion in zip(REQUESTS, completions, strict=True)
    ]


@pytest.mark.parametrize(
    ("prompts", "shared"),
    [
        ([(1, 2, 3), (1, 2, 4)], 2),
        ([(1, 2, 3), (1, 2)], 1),
        ([(1, 2, 3)], 2),
        ([(1, 2, 3), (2, 2, 3)], 0),
        ([(1,), (1,)], 0),
        ([(5, 1), (5, 1, 9), (5, 2)], 1),
    ],
)
def test_the_common_prefix_leaves_every_prompt_a_token_of_its_own(prompts: list[tuple[int, ...]], shared: int) -> None:
    assert common_prefix(prompts) == shared


async def test_a_small_memory_gives_the_same_completions_in_more_batches(
    engine: TransformersEngine, folder: Path
) -> None:
    small = TransformersEngine(folder, cache_bytes_max=100_000)
    await small.load(initial_weights(folder, 0), policy_version=0)
    completions = await engine.generate(REQUESTS, SAMPLING)
    in_parts = await small.generate(REQUESTS, SAMPLING)
    assert [c.token_ids for c in in_parts] == [c.token_ids for c in completions]
    whole = await engine.prefill(score_requests(completions), SAMPLING)
    parts = await small.prefill(score_requests(completions), SAMPLING)
    np.testing.assert_allclose(parts.logprobs_T, whole.logprobs_T, atol=1e-5)
    np.testing.assert_allclose(parts.margins_T, whole.margins_T, atol=1e-5)
    await small.close()


async def test_nothing_to_do_is_done(engine: TransformersEngine) -> None:
    assert await engine.generate([], SAMPLING) == []
    prefill = await engine.prefill([], SAMPLING)
    assert len(prefill.logprobs_T) == len(prefill.margins_T) == 0


async def test_the_scorer_agrees_with_one_plain_forward_pass_per_completion(
    engine: TransformersEngine, folder: Path
) -> None:
    completions = await engine.generate(REQUESTS, SAMPLING)
    prefill = await engine.prefill(score_requests(completions), SAMPLING)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = initial_weights(folder, 0)[name]
            parameter.copy_(torch.from_numpy(tensor.data).view(torch.bfloat16).reshape(tensor.shape))
        expected = []
        for request, completion in zip(REQUESTS, completions, strict=True):
            ids = torch.tensor([request.prompt_token_ids + completion.token_ids])
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            expected.append(logprobs[-len(completion.token_ids) :])
    np.testing.assert_allclose(prefill.logprobs_T, torch.cat(expected).numpy(), atol=1e-5)


async def test_a_token_that_the_seed_did_not_choose_has_a_margin(engine: TransformersEngine) -> None:
    completions = await engine.generate(REQUESTS, SAMPLING)
    asked = score_requests(completions)
    honest = await engine.prefill(asked, SAMPLING)
    assert (honest.margins_T == 0.0).all()
    first = asked[0]
    forged = ScoreRequest(
        first.prompt_token_ids, (first.completion_token_ids[0] ^ 1, *first.completion_token_ids[1:]), 0
    )
    assert first.seed is not None
    other_seed = ScoreRequest(first.prompt_token_ids, first.completion_token_ids, first.seed + 1)
    margins_T = (await engine.prefill([forged, other_seed], SAMPLING)).margins_T
    assert margins_T[0] > 0.0
    assert margins_T[len(first.completion_token_ids) :].max() > 0.0


async def test_weights_that_are_no_numbers_are_found_out(engine: TransformersEngine, folder: Path) -> None:
    weights = dict(initial_weights(folder, 0))
    norm = weights["model.norm.weight"]
    weights["model.norm.weight"] = WeightTensor("bf16", norm.shape, np.full_like(norm.data, 0x7FC0))
    with pytest.raises(EngineMismatch, match="nan"):
        await engine.load(weights, policy_version=3)


async def test_bf16_arithmetic_is_close_to_fp32(engine: TransformersEngine, folder: Path) -> None:
    half = TransformersEngine(folder, dtype="bf16")
    await half.load(initial_weights(folder, 0), policy_version=0)
    completions = await half.generate(REQUESTS, SAMPLING)
    prefill = await engine.prefill(score_requests(completions), SAMPLING)
    claimed = np.array([nats for completion in completions for nats in completion.logprobs])
    assert half.info.dtype == "bf16"
    assert np.abs(prefill.logprobs_T - claimed).mean() < 0.01
    assert (prefill.margins_T > 0).mean() < 0.03
    await half.close()


def variant(folder: Path, **changes: object) -> Weights:
    """Change config.json, and write random fp32 weights that match it."""
    config = json.loads((folder / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return to_weights(model.named_parameters(), dtype="fp32")


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    ],
)
async def test_other_architectures_pass_their_probe(folder: Path, changes: dict[str, object]) -> None:
    weights = variant(folder, **changes)
    other = TransformersEngine(folder)
    await other.load(weights, policy_version=0)
    completions = await other.generate(REQUESTS, SAMPLING)
    prefill = await other.prefill(score_requests(completions), SAMPLING)
    assert (prefill.margins_T == 0.0).all()
    await other.close()


def test_layers_with_a_window_below_the_positions_are_refused(folder: Path) -> None:
    variant(folder, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(LocalError, match="sliding_window is 8"):
        TransformersEngine(folder)
