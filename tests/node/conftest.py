"""Fixtures that several files of this folder use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prime_node.adapters.models.tiny_model import tiny_model_files

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with the special tokens of Qwen3."""
    folder = tmp_path_factory.mktemp("qwen3")
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL]
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": len(words)}))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for name, data in tiny_model_files(hidden_size=16, num_layers=1, num_heads=1, intermediate_size=16).items():
        (folder / name).write_bytes(data)
    return folder
