"""A small Qwen3-architecture model, generated on demand: its folder without weights, and its initial weights.

The tokenizer is byte-level: token ids 0 to 255 are the bytes of UTF-8, the eight ids above them are special. Embedding and
output head are not tied, because vLLM's CPU build leaves a tied head on its old weights when it reloads.

The files are part of the RunSpec, so the same arguments give the same bytes on every machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from prime_protocol.weights import Weights, WeightTensor, rounded_to

END, PAD, BEGIN, ANSWER = range(256, 260)
SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|begin|>", "<|answer|>", *(f"<|reserved_{n}|>" for n in range(4)))
"""Special tokens with ids 256 to 263. A dialogue is BEGIN question ANSWER answer END."""
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
POSITIONS_MAX = 4096
INIT_STD = 0.02
"""Standard deviation of the initial weights, as in Qwen3's own configuration."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ bos_token + message['content'] + '<|answer|>' }}{% endif %}"
    "{% endfor %}"
)


def tiny_model_files(
    *, hidden_size: int = 128, num_layers: int = 2, num_heads: int = 4, intermediate_size: int = 384
) -> dict[str, bytes]:
    """Return file name -> bytes for all the model's files but its weights. The defaults are the demo's 0.5 M parameters."""
    if hidden_size % num_heads or hidden_size // num_heads % 2:
        raise ValueError(f"hidden_size {hidden_size} must be divisible into {num_heads} heads of an even size")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BEGIN,
        "dtype": "bfloat16",
        "eos_token_id": END,
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": INIT_STD,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": POSITIONS_MAX,
        "model_type": "qwen3",
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": num_heads,
        "pad_token_id": PAD,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }
    tokenizer_config = {
        "bos_token": SPECIAL_TOKENS[BEGIN - 256],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[END - 256],
        "model_max_length": POSITIONS_MAX,
        "pad_token": SPECIAL_TOKENS[PAD - 256],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    generation_config = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    return {
        "config.json": _json_bytes(config),
        "generation_config.json": _json_bytes(generation_config),
        "tokenizer.json": _json_bytes(_byte_level_tokenizer()),
        "tokenizer_config.json": _json_bytes(tokenizer_config),
    }


def initial_weights(folder: Path, seed: int) -> Weights:
    """Return random bf16 weights for the config.json in `folder`: normal matrices, norms of one. A pure function of both."""
    config = json.loads((folder / "config.json").read_bytes())
    if config.get("model_type") != "qwen3" or config.get("attention_bias"):
        raise ValueError(f"{folder}/config.json: initial weights are made for plain Qwen3 models only")
    random = np.random.Generator(np.random.Philox(seed))
    weights: dict[str, WeightTensor] = {}
    for name, shape in _tensor_shapes(config):
        values = np.ones(shape) if len(shape) == 1 else random.standard_normal(shape) * config["initializer_range"]
        weights[name] = rounded_to(values.astype(np.float32), "bf16")
    return weights


def _tensor_shapes(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...]]]:
    """Return every parameter of a Qwen3 model, in the model's own order."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: list[tuple[str, tuple[int, ...]]] = [("model.embed_tokens.weight", (config["vocab_size"], hidden))]
    for layer in range(config["num_hidden_layers"]):
        block: list[tuple[str, tuple[int, ...]]] = [
            ("self_attn.q_proj", (queries, hidden)),
            ("self_attn.k_proj", (keys, hidden)),
            ("self_attn.v_proj", (keys, hidden)),
            ("self_attn.o_proj", (hidden, queries)),
            ("self_attn.q_norm", (head,)),
            ("self_attn.k_norm", (head,)),
            ("mlp.gate_proj", (inner, hidden)),
            ("mlp.up_proj", (inner, hidden)),
            ("mlp.down_proj", (hidden, inner)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ]
        shapes += [(f"model.layers.{layer}.{name}.weight", shape) for name, shape in block]
    shapes.append(("model.norm.weight", (hidden,)))
    if not config["tie_word_embeddings"]:
        shapes.append(("lm_head.weight", (config["vocab_size"], hidden)))
    return shapes


def _byte_level_tokenizer() -> dict[str, Any]:
    """Return the tokenizer.json of a byte-pair encoding without merges."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 256 + index,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, content in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(_byte_characters())},
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """Return the printable character for each byte in byte-level vocabularies: itself, or the next one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def _json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=True) + "\n").encode()
