"""Folders with the tokenizers of model families, and answers of their models."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from prime_protocol.rollout import Completion, FinishReason

SPECIAL = [
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>"),
    *("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEEPSEEK = (
    *("begin of sentence", "end of sentence", "User", "Assistant", "tool calls begin", "tool calls end"),
    *("tool call begin", "tool call end", "tool sep", "tool outputs begin", "tool outputs end", "tool output begin"),
    "tool output end",
)


def qwen3_model(folder: Path) -> Path:
    """Write a byte-level tokenizer with the special tokens of Qwen3."""
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


def deepseek(name: str) -> str:
    """Return a special token of DeepSeek. Example: deepseek("User")."""
    bar = "\N{FULLWIDTH VERTICAL LINE}"
    return f"<{bar}{name.replace(' ', chr(0x2581))}{bar}>"


def deepseek_model(folder: Path) -> Path:
    """Write the same tokenizer with the special tokens of DeepSeek too."""
    file = str(qwen3_model(folder) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens([*map(deepseek, DEEPSEEK)])
    tokenizer.save(file)
    return folder


def sampled(folder: Path, text: str) -> Completion:
    """Return the output of a model with this tokenizer, including special tokens."""
    ids = tuple(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)
    return Completion(ids, (-0.5,) * len(ids), FinishReason.STOP)


def deepseek_call(folder: Path, arguments: str, *, name: str = "add", times: int = 1) -> Completion:
    """Return an answer with calls of a tool. Their JSON text has no end if `arguments` has none."""
    begin, separator, end = map(deepseek, ("tool call begin", "tool sep", "tool call end"))
    call = f"{begin}function{separator}{name}\n```json\n{arguments}{end}"
    before, after, stop = map(deepseek, ("tool calls begin", "tool calls end", "end of sentence"))
    return sampled(folder, f"four{before}{times * call}{after}{stop}")
