"""Mixtures of experts are read and published under the hub's names, with one matrix per expert."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.node.batch_coordinator import tiny_files, write_model
from tests.node.rank_jobs import samples

from prime_node.adapters.engines.torch_weights import to_torch
from prime_node.adapters.engines.transformers_engine import TransformersEngine
from prime_node.adapters.models.pretrained_model import folder_weights
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.algo.losses import find_loss
from prime_protocol.errors import LocalError
from prime_protocol.weights import WeightTensor, root_of

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
NAMES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", "model.layers.1.mlp.experts.3.up_proj.weight"),
    "mixtral": ("MixtralForCausalLM", "model.layers.1.block_sparse_moe.experts.3.w3.weight"),
}


@pytest.fixture(params=sorted(NAMES))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved_model(tmp_path, request.param)


def saved_model(folder: Path, kind: str, **settings: int) -> Path:
    """Save a model with transformers, in the hub's form."""
    transformers = pytest.importorskip("transformers")
    made = write_model(folder / kind)
    dense = json.loads(tiny_files()["config.json"])
    config = dense | EXPERTS | {"architectures": [NAMES[kind][0]], "model_type": kind, "decoder_sparse_step": 1}
    (made / "config.json").write_text(json.dumps(config | settings))
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.from_pretrained(made), dtype=torch.bfloat16)
    model.save_pretrained(folder / "saved")
    for path in (folder / "saved").glob("*.safetensors"):
        path.rename(made / path.name)
    return made


def test_what_is_published_has_the_names_and_the_bits_of_the_hub(folder: Path) -> None:
    files = folder_weights(folder)
    assert NAMES[folder.name][1] in files
    published = TorchBackend(folder).snapshot()
    assert published.keys() == files.keys()
    assert root_of(published) == root_of({name: files[name] for name in published})


def test_a_trained_mixture_loads_in_transformers_as_it_is(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    backend = TorchBackend(folder, published_dtype="fp32")
    backend.train_step(samples(), find_loss("aipo"), lr=1e-2)
    safetensors = pytest.importorskip("safetensors.torch")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    tensors = {name: to_torch(tensor) for name, tensor in backend.snapshot().items()}
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    (sample,) = samples(1)
    ids = [*sample.prompt_token_ids, *sample.completion_token_ids]
    with torch.no_grad():
        logprobs = loaded(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[-len(sample.completion_token_ids) :, 0].tolist()
    assert backend.logprobs([sample])[0] == pytest.approx(expected, abs=1e-5)


async def test_an_engine_computes_with_the_hub_s_names(folder: Path) -> None:
    """The engine's probe compares its own path with a plain forward pass of the same weights."""
    weights = TorchBackend(folder).snapshot()
    engine = TransformersEngine(folder, threads=1)
    await engine.load(weights, policy_version=0)
    missing = dict(weights)
    del missing[NAMES[folder.name][1]]
    with pytest.raises(ValueError, match=r"lack .*experts"):
        await engine.load(missing, policy_version=1)
    await engine.close()


def test_an_expert_of_another_shape_is_refused(folder: Path) -> None:
    weights = dict(folder_weights(folder))
    name = NAMES[folder.name][1]
    weights[name] = WeightTensor("bf16", weights[name].shape[::-1], weights[name].data)
    with pytest.raises(LocalError, match="another shape of"):
        TorchBackend(folder, weights)


@pytest.mark.vllm
@pytest.mark.timeout(300)
async def test_vllm_computes_with_every_policy_of_a_mixture(tmp_path: Path) -> None:
    """The engine's probe compares each load with a forward pass, which shows that experts are packed again."""
    pytest.importorskip("vllm")
    from prime_node.adapters.engines.vllm_engine import VllmEngine

    folder = saved_model(tmp_path, "qwen3_moe", hidden_size=64, head_dim=32, moe_intermediate_size=64)
    backend = TorchBackend(folder)
    engine = VllmEngine(folder, context_tokens_max=64)
    try:
        for policy_version in range(3):
            await engine.load(backend.snapshot(), policy_version=policy_version)
            backend.train_step(samples(seed=policy_version), find_loss("aipo"), lr=1e-2)
    finally:
        await engine.close()
