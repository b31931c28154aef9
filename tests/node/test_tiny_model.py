"""The small model's files and initial weights, compared with the software that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny_model_world import write_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.tiny_model import initial_weights, tiny_model_files
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.weights import root_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path)


def test_the_files_are_the_same_bytes_everywhere() -> None:
    # These digests stand in signed RunSpecs. A change here is another model.
    assert {name: digest_of(data)[:16] for name, data in tiny_model_files().items()} == {
        "config.json": "4d4bd36283963449",
        "generation_config.json": "23732ae247f217e5",
        "tokenizer.json": "a77d40d071d2d39d",
        "tokenizer_config.json": "8018818454e03219",
    }


def test_initial_weights_depend_on_the_seed_and_on_nothing_else(folder: Path) -> None:
    assert root_of(initial_weights(folder, 7)) == root_of(initial_weights(folder, 7))
    assert root_of(initial_weights(folder, 7)) != root_of(initial_weights(folder, 8))
    assert root_of(initial_weights(folder, 7))[:16] == "2ddf3c16c1f66a3a"


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 64, "num_layers": 3, "num_heads": 2, "intermediate_size": 96}])
def test_the_weights_are_those_of_transformers_own_model_in_its_order(tmp_path: Path, sizes: dict[str, int]) -> None:
    write_tiny_model(tmp_path, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    expected = [(name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()]
    weights = initial_weights(tmp_path, 0)
    assert [(name, tensor.shape) for name, tensor in weights.items()] == expected
    assert {tensor.dtype for tensor in weights.values()} == {"bf16"}


def test_matrices_are_normal_with_the_configured_deviation_and_norms_are_one(folder: Path) -> None:
    deviation = json.loads((folder / "config.json").read_bytes())["initializer_range"]
    for name, tensor in initial_weights(folder, 0).items():
        values = (tensor.data.astype(np.uint32) << 16).view(np.float32)
        if "norm" in name:
            assert (values == 1.0).all()
        else:
            assert abs(values.mean()) < 0.05 * deviation
            assert values.std() == pytest.approx(deviation, rel=0.05)


def test_heads_of_an_odd_size_are_refused() -> None:
    with pytest.raises(ValueError, match="even size"):
        tiny_model_files(hidden_size=60, num_heads=4)


@pytest.mark.parametrize("text", ["", "sun", "Straße, 日本, \x00 \t\n", "a<|end|>b", " leading and trailing "])
def test_the_tokenizer_is_bytes_and_back(folder: Path, text: str) -> None:
    tokenizer = HfTokenizer(folder)
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text


def test_bytes_that_are_no_text_become_replacement_characters(folder: Path) -> None:
    assert HfTokenizer(folder).decode([104, 0xC3, 105]) == "h\N{REPLACEMENT CHARACTER}i"


def test_special_tokens_do_not_show_in_text(folder: Path) -> None:
    tokenizer = HfTokenizer(folder)
    assert tokenizer.stop_token_id == 256
    assert tokenizer.vocab_size == 264
    assert tokenizer.decode([258, 104, 105, 256, 263]) == "hi"


def test_a_prompt_is_begin_question_answer(folder: Path) -> None:
    assert HfTokenizer(folder).encode_prompt("sun") == [258, *b"sun", 259]


def test_a_problem_cannot_write_special_tokens(folder: Path) -> None:
    text = "x<|answer|>y<|end|><|begin|>"
    assert HfTokenizer(folder).encode_prompt(text) == [258, *text.encode(), 259]


def test_transformers_reads_the_same_tokenizer_and_template(folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    message = [{"role": "user", "content": "Wörter: sun"}]
    rendered: Any = theirs.apply_chat_template(message, add_generation_prompt=True, tokenize=True)
    assert rendered["input_ids"] == HfTokenizer(folder).encode_prompt("Wörter: sun")
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.bos_token_id, len(theirs)) == (256, 257, 258, 264)


def test_a_chat_template_of_the_usual_kind_is_cut_around_the_text(folder: Path) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    config["chat_template"] = (
        "{%- for message in messages %}{{- '<|begin|>' + message.role + '\\n' + message.content + '<|end|>' + '\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|begin|>assistant\\n' }}{%- endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    expected = [258, *b"user\n", *b"sun", 256, *b"\n", 258, *b"assistant\n"]
    assert HfTokenizer(folder).encode_prompt("sun") == expected


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ messages[0].content }}{{ messages[0].content }}", "exactly once"),
        ("{{ messages[0].content | upper }}", "exactly once"),
        ("{{ raise_exception('no') }}", "refuses"),
        ("{{ strftime_now('%Y') }}{{ messages[0].content }}", "today"),
    ],
)
def test_a_template_that_cannot_be_cut_is_refused(folder: Path, template: str, why: str) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    with pytest.raises(LocalError, match=why):
        HfTokenizer(folder)


def test_a_folder_without_an_end_token_is_refused(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(LocalError, match="eos_token"):
        HfTokenizer(folder)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", "\xff"),
        ("tokenizer_config.json", '{"eos_token": "<|end|>", "chat_template": "{% for %}"}'),
        ("tokenizer_config.json", '{"eos_token": "<|end|>", "chat_template": [{}]}'),
        ("config.json", '{"vocab_size": null}'),
    ],
)
def test_a_broken_file_of_a_tokenizer_gives_one_sentence(folder: Path, name: str, text: str) -> None:
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(LocalError, match=rf"tokenizer's files|{name}: "):
        HfTokenizer(folder)
