"""Models with sliding windows (Gemma 3): a run has as many positions as the window, within which they are full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.node.batch_coordinator import tiny_files

from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.model_config import fit_window, read_model_config, require_supported
from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.adapters.training.packed_attention import packed_attention
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_node.algo.shares import Packing
from prime_node.cli.wire_new import make_model_files
from prime_node.coordinator.new_run import PretrainedModel
from prime_node.ports.engine import GenerateRequest, ScoreRequest
from prime_node.ports.train_samples import TrainSample
from prime_protocol.assignment import Sampling
from prime_protocol.errors import LocalError

WINDOW = 32
"""Above the length of the sequences that an engine probes its weights with."""
ENTRIES = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 1024,
    "initializer_range": 0.3,
}


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Save a small model as Gemma 3 is published: its own rotary frequencies in the layers with windows, and a tied head."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "pretrained"
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**ENTRIES))
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin at 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    for name, data in tiny_files().items():
        if name != "config.json":
            (folder / name).write_bytes(data)
    return folder


@pytest.fixture
def folder(pretrained: Path, tmp_path: Path) -> Path:
    """Return a new run's model, with the weights that the trainer begins with."""
    made = tmp_path / "model"
    new = make_model_files(PretrainedModel(kind="pretrained", name_or_path=str(pretrained)), made)
    assert json.loads(new.files["config.json"])["max_position_embeddings"] == WINDOW
    (made / "model.safetensors").write_bytes((pretrained / "model.safetensors").read_bytes())
    return made


def plain_logprobs(folder: Path, token_ids: tuple[int, ...], first: int) -> list[float]:
    """Return transformers' own fp32 logprobs from a position on, with its masks of windows."""
    transformers = pytest.importorskip("transformers")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    found: list[float] = logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[first - 1 :, 0].tolist()
    return found


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
