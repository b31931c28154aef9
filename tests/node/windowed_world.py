"""A small model of random weights with sliding windows, as Gemma 3 is published, and what plain transformers computes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.node.batch_coordinator import tiny_files

from prime_node.cli.wire_new import make_model_files
from prime_node.coordinator.new_run import PretrainedModel

WINDOW = 32
"""Above the length of the sequences that the transformers engine probes its weights with."""
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


def save_pretrained(folder: Path, **entries: int) -> Path:
    """Save a small model as Gemma 3 is published: its own rotary frequencies in the layers with windows, and a tied head.

    `entries` of its config replace those of ENTRIES.
    """
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**{**ENTRIES, **entries}))
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin at 0
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(folder)
    for name, data in tiny_files().items():
        if name != "config.json":
            (folder / name).write_bytes(data)
    return folder


def model_of_run(pretrained: Path, folder: Path) -> Path:
    """Make the model of a new run from a published one, with the weights that the trainer begins with."""
    new = make_model_files(PretrainedModel(kind="pretrained", name_or_path=str(pretrained)), folder)
    window = json.loads((pretrained / "config.json").read_bytes())["sliding_window"]
    assert json.loads(new.files["config.json"])["max_position_embeddings"] == window
    (folder / "model.safetensors").write_bytes((pretrained / "model.safetensors").read_bytes())
    return folder


def plain_logprobs(folder: Path, token_ids: tuple[int, ...], first: int) -> list[float]:
    """Return transformers' own fp32 logprobs from a position on, with its masks of windows."""
    transformers = pytest.importorskip("transformers")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    found: list[float] = logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[first - 1 :, 0].tolist()
    return found
