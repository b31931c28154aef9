"""A run's config.json and tokenizer files are a stranger's: faults are refused with file and field, before they cost anything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_model_world import charsmap, write_tiny_model

from prime_node.adapters.models.hf_tokenizer import HfTokenizer
from prime_node.adapters.models.model_folder import (
    FILE_BYTES_MAX,
    read_config,
    require_listed,
    require_plain,
    rope_table_bytes,
)
from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import ModelFile

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path, **SIZES)


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()) | entries))


@pytest.mark.parametrize(
    "kind",
    [
        *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "mixtral", "phi3", "smollm3", "olmo2", "granite", "glm4"),
        *(
            "deepseek_v3",
            "gpt2",
            "gpt_neo",
            "gpt_neox",
            "opt",
            "gemma",
            "gemma3_text",
            "cohere",
            "starcoder2",
            "stablelm",
        ),
    ],
)
def test_configurations_as_transformers_writes_them_pass(tmp_path: Path, kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    origin = {"_model_name_or_path": "A note 1", "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}
    labelled = origin | {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG_MAPPING[kind]().to_dict(), **labelled}, default=str))
    assert read_config(tmp_path)["model_type"] == kind


@pytest.mark.parametrize(
    "entries",
    [
        {"num_hidden_layers": 10**9},
        {"hidden_size": 10**9},
        {"intermediate_size": 2**63},
        {"hidden_size": -4},
        {"head_dim": 10**30},
        {"num_attention_heads": 10**9},
        {"vocab_size": 2**31},
        {"max_position_embeddings": 10**9},
        {"num_labels": 10**9},
        {"num_local_experts": 10**7},
        {"num_hidden_layers": 1000, "num_experts": 4000},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"rope_parameters": {"rope_type": "linear", "factor": 1e9}},
        {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 10**9}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 100_000}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1e300]}},
        {"layer_types": ["full_attention"] * 100_000},
        {"bos_token_id": 2**40},
        {"eos_token_id": [2**40]},
        {"sliding_window": 10**12},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": float("inf")},
        {"rms_norm_eps": 1e300},
        {"hidden_act": "a" * 10**5},
        {"_attn_implementation": {"": "someone/kernel"}},
        {"attn_implementation": {"": "someone/kernel"}},
        {"_attn_implementation_internal": "someone/kernel"},
        {"_attn_implementation": "flash_attention_2"},
        {"_experts_implementation": "someone/kernel"},
        {"text_config": {"_attn_implementation": {"": "someone/kernel"}}},
        {"speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "/somewhere/else"}}},
        {"text_config": {"speculators_config": {"verifier": {"name_or_path": "/somewhere/else"}}}},
        {"a_key_of_a_later_version": "folder/else"},
        {"a_key_of_a_later_version": ["someone/model"]},
        {"a_key_of_a_later_version": [{"load": 1}]},
        {"auto_map": {"AutoConfig": "evil.Config"}},
        {"nested": [{"auto_map": {"AutoConfig": "evil.Config"}}]},
        {"quantization_config": {"quant_method": "gptq"}},
        {"attn_implementation": "somebody/kernel"},
    ],
    ids=lambda entries: ", ".join(entries),
)
def test_a_hostile_config_is_refused_by_file_and_field(folder: Path, entries: dict[str, object]) -> None:
    change(folder / "config.json", **entries)
    with pytest.raises(LocalError, match=r"config\.json: .*ask the run's operator") as caught:
        require_plain(folder)
    named = (*entries, "auto_map", "layers of", "NaN is not JSON", "Infinity is not JSON")
    assert any(name in str(caught.value) for name in named)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "text",
    [
        "[" * 10**6 + "]" * 10**6,
        '{"a":' * 10**5 + "1" + "}" * 10**5,
        '{"a": 1, "a": 2}',
        '{"a": NaN}',
        "\ufeff{}",
        "[]",
        "{",
    ],
    ids=["lists", "objects", "twice", "nan", "mark", "list", "cut"],
)
def test_json_that_parsers_read_differently_or_deeply_is_refused_by_file(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    with pytest.raises(LocalError, match=rf"{name}: "):
        require_plain(folder)


@pytest.mark.parametrize(
    "name", [name for name in FILE_BYTES_MAX if FILE_BYTES_MAX[name] <= limits.MODEL_FILE_BYTES_MAX]
)
def test_a_file_larger_than_its_kind_is_refused_before_it_is_parsed(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(2**40)  # sparse: a petabyte could not be read either
    with pytest.raises(LocalError, match=rf"{name}: more than [\d,]+ bytes"):
        require_plain(folder)


@pytest.mark.parametrize(
    "name", ["params.json", "hf_quant_config.json", "adapter_config.json", "modeling.py", "tekken.json"]
)
def test_a_file_that_would_steer_an_engine_is_refused_before_it_is_fetched(name: str) -> None:
    listed = ModelFile.model_construct(name=name, digest=digest_of(b""), size=1)
    with pytest.raises(LocalError, match=rf"model file {name} is not one of config\.json"):
        require_listed([listed])


def test_a_file_that_the_run_says_is_huge_is_refused_before_it_is_fetched() -> None:
    with pytest.raises(LocalError, match=r"config\.json has 4,194,305 bytes"):
        require_listed([ModelFile(name="config.json", digest=digest_of(b""), size=limits.MODEL_FILE_BYTES_MAX + 1)])


def test_a_table_of_positions_is_planned_with_the_factor_of_its_kind(folder: Path) -> None:
    change(folder / "config.json", max_position_embeddings=1000, head_dim=16)
    assert rope_table_bytes(read_config(folder)) == 1000 * 16 * 4
    change(folder / "config.json", rope_parameters={"rope_type": "linear", "factor": 8.0})
    assert rope_table_bytes(read_config(folder)) == 8000 * 16 * 4
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 500}
    change(folder / "config.json", rope_parameters=yarn)
    assert rope_table_bytes(read_config(folder)) == 2000 * 16 * 4


STEP = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
UNTYPED = {name: value for name, value in STEP.items() if name != "type"} | {"content": "a" * 1000}
LONG = STEP | {"pattern": {"Regex": "a" * 4000}, "content": ""}
SPLIT = {"type": "Split", "pattern": {"Regex": "a"}, "behavior": "Isolated", "invert": False}
LONGER = STEP | {"content": "a" * 1000}
WORDS = {"type": "WordPiece", "unk_token": "a", "vocab": {"a": 0}}
SHOWN = {"Sequence": {"id": "A", "type_id": 0}}
PADDING: dict[str, Any] = {
    "strategy": "BatchLongest",
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "a",
}


@pytest.mark.parametrize(
    ("part", "value", "why"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [STEP] * 40}, "times as long"),
        ("normalizer", STEP | {"content": "a" * 10**6}, "times as long"),
        ("normalizer", STEP | {"pattern": {"Regex": ""}, "content": "a" * 1000}, "times as long"),
        ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}, "steps"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "not a table"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": charsmap("a", "a" * 1000)}, "times as long"),
        ("decoder", {"type": "Sequence", "decoders": [STEP] * 40}, "times as long"),
        ("decoder", {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 40}, "times as long"),
        (
            "decoder",
            {"type": "Sequence", "decoders": [{"type": "CTC", "word_delimiter_token": ""}] * 9},
            "times as long",
        ),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}, "nested repeats"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": r"(a)\1"}, "behavior": "Isolated"}, "back-reference"),
        ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "a|" * 9999}, "behavior": "Isolated"}, "characters"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [SPLIT] * 40}, "40 expressions"),
        ("normalizer", {"type": "Sequence", "normalizers": [LONG] * 8}, "characters"),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 10**4}, "times as long"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 20}, "times as long"),
        ("normalizer", LONGER | {"prepend": ""}, "times as long"),
        ("normalizer", LONGER | {"single": []}, "times as long"),
        ("normalizer", LONGER | {"suffix": ""}, "times as long"),
        ("normalizer", LONGER | {"precompiled_charsmap": "AAAAAA=="}, "times as long"),
        ("decoder", LONGER | {"type": "another"}, "times as long"),  # it is a Replace all the same
        ("decoder", LONGER | {"type": "NFC"}, "times as long"),
        (
            "normalizer",
            {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "aaaa"}] * 60},
            "times as long",
        ),
        ("normalizer", [STEP["pattern"], "a" * 1000], "normalizer is a step without a type"),
        ("normalizer", [[[STEP["pattern"], "a" * 1000]]], "normalizer is a step without a type"),
        ("normalizer", {"type": "Sequence", "normalizers": [["a" * 1000]]}, "normalizers.0 is a step without a type"),
        ("normalizer", {"type": "Sequence", "normalizers": [UNTYPED]}, "normalizers.0 is a step without a type"),
        ("normalizer", UNTYPED, "normalizer is a step without a type"),
        ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"pattern": SPLIT["pattern"]}]}, "without a type"),
        ("padding", PADDING | {"strategy": {"Fixed": 10**9}}, "padding lengthens"),
        ("padding", PADDING | {"pad_to_multiple_of": 10**9}, "padding lengthens"),
        ("model", {"type": "BPE", "vocab": {"a": 2**31}, "merges": []}, "token's id"),
        ("model", {"type": "BPE", "vocab": {"a": -1}, "merges": []}, "token's id"),
        ("model", {"type": "BPE", "vocab": {}, "merges": ["a b"] * (limits.TOKENIZER_ENTRIES_MAX + 1)}, "model.merges"),
        ("model", WORDS | {"max_input_chars_per_word": 10**9}, "max_input_chars_per_word"),
        ("model", WORDS | {"continuing_subword_prefix": "#" * 10**6}, "a token of 1,000,000"),
        ("model", {"type": "BPE", "unk_token": "a" * 200, "vocab": {"a" * 200: 0}, "merges": []}, "a token of 200"),
        ("model", {"type": "BPE", "vocab": {"b": 1, "a" * 200: 1}, "merges": []}, "a token of 200"),
        ("model", {"type": "Unigram", "unk_id": 0, "vocab": [["a" * 200, -1.0]]}, "a token of 200"),
        ("model", {"type": "BPE", "vocab": {"a" * 10**6: 1}, "merges": []}, "a token of 1,000,000"),
        ("model", [], "has no model"),
        ("truncation", {"direction": "Right", "max_length": 999, "strategy": "LongestFirst", "stride": 998}, "stride"),
        ("post_processor", {"type": "TemplateProcessing", "single": [SHOWN] * 1000}, "times as long"),
        ("added_tokens", [{"id": 2**40, "content": "x"}], "token's id"),
        ("added_tokens", [{"id": 1, "content": "x" * 1000}] * 2000, "added tokens have"),
        ("added_tokens", [{"id": 1, "content": "x" * 10**6}], "an added token has"),
        ("added_tokens", [{"id": 1, "content": "x"}] * 70_000, "70,000 added tokens"),
    ],
)
def test_a_hostile_tokenizer_is_refused_by_file_and_field(folder: Path, part: str, value: Any, why: str) -> None:
    change(folder / "tokenizer.json", **{part: value})
    with pytest.raises(LocalError, match=rf"tokenizer\.json: .*{why}.*ask the run's operator"):
        HfTokenizer(folder)


CHILD = """
import json, resource, sys, time
from pathlib import Path
from prime_node.adapters.models.causal_model import CausalModel
from prime_protocol.errors import LocalError
path = Path(sys.argv[1]) / "config.json"
plain = json.loads(path.read_bytes())
CausalModel(path.parent, dtype="fp32", device="cpu")
for entries in json.load(sys.stdin):
    path.write_text(json.dumps(entries if "model_type" in entries else plain | entries))
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        CausalModel(path.parent, dtype="fp32", device="cpu")
        outcome = "built"
    except LocalError as error:
        outcome = str(error)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps([outcome, grown // 1024, time.process_time() - began]), flush=True)
"""
NEO: dict[str, object] = {
    "model_type": "gpt_neo",
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "attention_types": [[["global"], 2]],
    "vocab_size": 264,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "intermediate_size": 64,
}


@pytest.mark.slow
def test_a_model_is_planned_with_its_tables_before_anything_large_is_allocated(folder: Path) -> None:
    """Tables in addition to weights: masks of positions squared (before, a gpt_neo of 60,000 positions took 3.6 GB a layer),
    labels, sines."""
    hostile: list[dict[str, object]] = [
        NEO | {"max_position_embeddings": 2**20},
        {
            "model_type": "gptj",
            "n_embd": 2**20,
            "n_layer": 1,
            "n_head": 2**10,
            "rotary_dim": 2**20,
            "n_positions": 2**24,
        },
        {"num_labels": 10**8},
        {"hidden_size": 2**20, "intermediate_size": 2**20},
        {"num_hidden_layers": 1024, "hidden_size": 2**15, "intermediate_size": 2**17},
        {"vocab_size": 2**24, "hidden_size": 2**16},
        {"head_dim": 2**20, "max_position_embeddings": 2**24},
        {"architectures": ["MambaForCausalLM"]},
        {"architectures": ["Qwen3ForCausalLM", "TransformersForCausalLM"]},
        {"model_type": "no-such"},
    ]
    text = json.dumps(hostile)
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], input=text, capture_output=True, text=True, check=True
    )
    outcomes = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(outcomes) == len(hostile)
    for entries, (outcome, grown_mib, seconds) in zip(hostile, outcomes, strict=True):
        assert "config.json: " in outcome, (entries, outcome)
        assert grown_mib < 200, (entries, outcome)
        assert seconds < 20, (entries, outcome)
