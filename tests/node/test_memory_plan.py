"""The plan of the trainer's memory, compared with torch's own numbers for real shapes on the meta device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from prime_node.adapters.models.lora import LoraSettings, add_adapters, is_adapter
from prime_node.adapters.models.model_config import model_shape
from prime_node.adapters.training import packed_attention
from prime_node.algo.memory_plan import TrainerLoad, trainer_memory

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3_584,
        "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 5_120,
        "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 1_024,
        "intermediate_size": 3_072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip
PARAMETERS = {"Qwen2.5-7B": 7.62e9, "Qwen3-32B": 32.8e9, "Qwen3-0.6B": 0.596e9}
TOKENS = 8_192


class FlashOnMeta(torch.autograd.Function):
    """Flash attention without arithmetic: it keeps what a flash kernel keeps for the backward pass."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


class MetaLayout:
    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float) -> Tensor:
        out: Tensor = FlashOnMeta.apply(query, key, value)
        return out


def folder_of(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 32_768, **CONFIGS[name]}))
    return folder


def meta_model(name: str, folder: Path, dtype: torch.dtype) -> Any:
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"), no_init_weights():
        config = AutoConfig.from_pretrained(folder_of(name, folder))
        model = auto.from_config(config, dtype=dtype, attn_implementation=packed_attention.NAME)
        model.tie_weights()
    return model.train()


def kept_bytes(model: Any, *, tokens: int, recompute: bool) -> int:
    """Return the bytes that torch keeps for the backward pass of the decoder, besides the parameters."""
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage
        return tensor

    inputs = {
        "input_ids": torch.zeros(1, tokens, dtype=torch.long, device="meta"),
        "position_ids": torch.arange(tokens, device="meta")[None],
    }
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.base_model(**inputs, use_cache=False, layout=MetaLayout())
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_shape_is_counted_from_the_configuration_alone(name: str, tmp_path: Path) -> None:
    shape = model_shape(folder_of(name, tmp_path))
    assert shape.parameters == pytest.approx(PARAMETERS[name], rel=0.01)
    heads = 1 if CONFIGS[name]["tie_word_embeddings"] else 2
    assert shape.root_parameters == heads * CONFIGS[name]["vocab_size"] * CONFIGS[name]["hidden_size"]
    assert shape.has_head_norms == name.startswith("Qwen3")
    assert shape.keys == CONFIGS[name]["num_key_value_heads"] * 128


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_planned_activations_are_those_that_torch_keeps(name: str, dtype: str, tmp_path: Path) -> None:
    model = meta_model(name, tmp_path, DTYPES[dtype])
    planned = trainer_memory(
        model_shape(tmp_path), TrainerLoad(compute_dtype=dtype, pass_tokens=TOKENS, recompute=False)
    ).activations
    assert planned == pytest.approx(kept_bytes(model, tokens=TOKENS, recompute=False), rel=0.05)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_recomputed_activations_are_one_layer_and_the_inputs_of_all(name: str, tmp_path: Path) -> None:
    model = meta_model(name, tmp_path, torch.bfloat16)
    shape = model_shape(tmp_path)
    again, kept = (
        trainer_memory(shape, TrainerLoad(compute_dtype="bf16", pass_tokens=TOKENS, recompute=recompute)).activations
        for recompute in (True, False)
    )
    inputs = kept_bytes(model, tokens=TOKENS, recompute=True)
    assert again == pytest.approx(inputs + kept / shape.layers, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 8])
def test_planned_state_is_what_torchs_adamw_and_its_parameters_hold(ranks: int, tmp_path: Path) -> None:
    model = meta_model("Qwen2.5-7B", tmp_path, torch.float32)
    masters = [torch.nn.Parameter(torch.empty_like(parameter)) for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, foreach=False)
    for parameter, master in zip(model.parameters(), masters, strict=True):
        parameter.grad = master.grad = torch.empty_like(master)
    optimizer.step()
    held = [*model.parameters(), *masters, *(master.grad for master in masters if master.grad is not None)]
    held += [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    total = sum(tensor.numel() * tensor.element_size() for tensor in held)
    planned = trainer_memory(model_shape(tmp_path), TrainerLoad(ranks=ranks)).state
    assert planned == pytest.approx(total / ranks, rel=1e-6)


def test_planned_adapters_are_those_that_are_added(tmp_path: Path) -> None:
    model = meta_model("Qwen2.5-7B", tmp_path, torch.float32)
    with torch.device("meta"):
        add_adapters(model, LoraSettings(rank=16, alpha=32))
    added = sum(parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name))
    assert model_shape(tmp_path).adapter_parameters(16) == added


def test_offload_moves_the_state_to_the_host_and_8_bit_moments_save_six_bytes_a_parameter(tmp_path: Path) -> None:
    shape = model_shape(folder_of("Qwen3-32B", tmp_path))
    plain, offloaded, small = (
        trainer_memory(shape, TrainerLoad(ranks=8, compute_dtype="bf16", offload=offload, moments=moments))
        for offload, moments in ((False, "fp32"), (True, "fp32"), (False, "8bit"))
    )
    assert offloaded.state == 0
    assert offloaded.host == plain.state
    assert plain.state - small.state == pytest.approx(5.94 * shape.parameters / 8)
