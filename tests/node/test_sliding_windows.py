"""Models with sliding windows (Gemma 3): a run has as many positions as the window, within which they are full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.node.windowed_world import ENTRIES, WINDOW, model_of_run, plain_logprobs, save_pretrained

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.model_config import fit_window, read_model_config, require_supported
from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.adapters.training.packed_attention import packed_attention
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.shares import Packing
from prime_node.ports.engine import GenerateRequest, ScoreRequest
from prime_node.ports.train_samples import TrainSample
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    return save_pretrained(tmp_path / "pretrained")


@pytest.fixture
def folder(pretrained: Path, tmp_path: Path) -> Path:
    return model_of_run(pretrained, tmp_path / "model")


@pytest.mark.parametrize("packing", [Packing.TREE, Packing.SEQUENCES])
async def test_trainer_engine_and_validator_compute_what_transformers_does(
    pretrained: Path, folder: Path, packing: Packing
) -> None:
    prompt, completion_tokens = (5, 77, 130, 9), WINDOW - 4
    backend = TorchBackend(folder, folder_weights(folder), packing=packing)
    engine = TransformersEngine(folder, threads=1)
    await engine.load(backend.snapshot(), policy_version=0)
    requests = [GenerateRequest(prompt, seed=seed) for seed in (3, 4)]
    sampling = Sampling(completion_tokens_max=completion_tokens, stop_token_ids=(263,))
    completions = await engine.generate(requests, sampling)
    scored = await engine.prefill([ScoreRequest(prompt, one.token_ids, seed=3) for one in completions], sampling)
    await engine.close()
    samples = [TrainSample(prompt, one.token_ids, one.logprobs, advantage=1.0) for one in completions]
    trained = backend.logprobs(samples)
    assert max(len(one.token_ids) for one in completions) == completion_tokens
    parts = scored.split([len(one.token_ids) for one in completions])
    for number, one in enumerate(completions):
        expected = plain_logprobs(pretrained, (*prompt, *one.token_ids), len(prompt))
        assert len(expected) == len(one.token_ids)
        assert list(one.logprobs) == pytest.approx(expected, abs=1e-4)
        assert parts[number].logprobs_T.tolist() == pytest.approx(expected, abs=1e-4)
        assert list(trained[number]) == pytest.approx(expected, abs=1e-4)
    assert backend.train_step(samples, find_loss("aipo"), lr=1e-3).log_ratio_abs < 1e-4


def test_a_sequence_beyond_the_window_would_differ_and_is_refused(pretrained: Path, folder: Path) -> None:
    tokens = tuple(range(20, 20 + 2 * WINDOW))
    with pytest.raises(LocalError, match=f"longer than the model's max_position_embeddings = {WINDOW}"):
        TorchBackend(folder).logprobs([TrainSample(tokens[:4], tokens[4:], (-1.0,) * (len(tokens) - 4), advantage=1.0)])
    windowed = plain_logprobs(pretrained, tokens, len(tokens) - 1)
    config = json.loads((pretrained / "config.json").read_bytes())
    (pretrained / "config.json").write_text(json.dumps({**config, "sliding_window": 1024}))
    assert plain_logprobs(pretrained, tokens, len(tokens) - 1) != pytest.approx(windowed, abs=1e-3)


def test_a_run_that_asks_for_more_positions_than_the_window_is_refused(folder: Path) -> None:
    assert fit_window(folder) is None
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": WINDOW + 1}))
    with pytest.raises(
        LocalError, match=r"sliding_window is 32 and max_position_embeddings 33; .*`prime-node new` makes"
    ):
        read_model_config(folder)


def test_models_with_windows_whose_attention_does_more_are_refused(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {name: value for name, value in ENTRIES.items() if name != "architectures"}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    cases = (
        (transformers.Gemma2Config(**sizes), "Gemma2ForCausalLM", "attn_logit_softcapping is set"),
        (transformers.GptOssConfig(**sizes, **experts), "GptOssForCausalLM", "attention sinks"),
    )
    for config, name, reason in cases:
        written = {**config.to_dict(), "architectures": [name], "max_position_embeddings": WINDOW}
        (folder / "config.json").write_text(json.dumps(written))
        with pytest.raises(LocalError, match=reason):
            require_supported(folder)
        attention: Any = packed_attention
        more = {"softcap": 50.0} if name.startswith("Gemma2") else {"s_aux": torch.zeros(2)}
        with pytest.raises(LocalError, match="cannot compute"):
            attention(None, *(torch.zeros(1, 2, 1, 16),) * 3, None, scaling=1.0, layout=None, **more)
