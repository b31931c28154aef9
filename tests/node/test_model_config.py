"""A run's config.json may be broken, hostile or too large: each case gives a one-line error, and no code in it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_node.adapters.models.causal_model import CausalModel
from prime_node.adapters.models.model_config import require_fitting, require_supported, require_within
from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.adapters.training.torch_backend import TorchBackend
from prime_node.cli.wire_new import make_model_files
from prime_node.coordinator.new_run import PretrainedModel
from prime_protocol.errors import LocalError

SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 64}
Build = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes(tiny_model_files(**SIZES)["config.json"])
    return tmp_path


@pytest.fixture(params=["engine", "trainer"])
def build(request: pytest.FixtureRequest) -> Build:
    if request.param == "engine":
        return lambda folder: CausalModel(folder, dtype="fp32", device="cpu")
    return lambda folder: TorchBackend(folder)


def change(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | entries))


@pytest.mark.parametrize(
    "entries",
    [
        {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}},
        {"text_config": {"auto_map": {"AutoConfig": "evil.Config"}}},
        {"_attn_implementation": "somebody/kernel"},
    ],
)
def test_code_that_a_config_brings_is_refused_and_not_run(
    folder: Path, build: Build, entries: dict[str, object]
) -> None:
    ran = folder / "ran"
    (folder / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    change(folder, **entries)
    with pytest.raises(LocalError, match=r"config\.json: .*asks to run code"):
        build(folder)
    assert not ran.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "{}"])
def test_a_config_that_is_no_configuration_is_named(folder: Path, build: Build, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(LocalError, match=r"config\.json: (not|transformers cannot build)"):
        build(folder)


@pytest.mark.parametrize(
    "entries",
    [
        {"model_type": "of-next-year"},
        {"hidden_size": "wide"},
        {"hidden_size": -1},
        {"num_attention_heads": 0, "head_dim": None},
        {"hidden_act": "none-such"},
        {"vocab_size": None},
    ],
)
def test_values_that_the_model_refuses_are_laid_to_the_config(
    folder: Path, build: Build, entries: dict[str, object]
) -> None:
    change(folder, **entries)
    with pytest.raises(LocalError, match=r"config\.json: transformers cannot build"):
        build(folder)


def test_a_model_larger_than_the_memory_is_refused_with_both_figures(folder: Path, build: Build) -> None:
    change(folder, hidden_size=2**17, intermediate_size=2**20)
    with pytest.raises(LocalError, match=r"need [\d.]+ GiB of memory, and [\d.]+ GiB are available"):
        build(folder)


def test_a_model_whose_policies_the_run_would_not_take_is_refused_before_it_is_built(folder: Path) -> None:
    require_within(folder, checkpoint_bytes_max=2**20)
    with pytest.raises(
        LocalError, match=r"[\d,]+ parameters are [\d,]+ bytes, and the run's limits\.checkpoint_bytes_max"
    ):
        require_within(folder, checkpoint_bytes_max=2**10)


def test_a_run_that_does_not_fit_its_model_is_refused_before_it_is_built(folder: Path) -> None:
    """Before, vLLM ended with a traceback on its prompts, or honest work was rejected as dishonest."""
    require_fitting(folder, vocab_size=264, context_tokens_max=4_096)
    for vocab_size in (263, 265, 2**24):
        with pytest.raises(LocalError, match=rf"has 264 token ids, and the run's vocab_size is {vocab_size:,}"):
            require_fitting(folder, vocab_size=vocab_size, context_tokens_max=16)
    with pytest.raises(LocalError, match=r"has 4,096 positions, and the run's sequences have up to 4,097 tokens"):
        require_fitting(folder, vocab_size=264, context_tokens_max=4_097)


def test_a_model_whose_vocabulary_is_that_of_its_text_alone_is_refused_in_one_line(folder: Path) -> None:
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        LocalError, match=r"config\.json: transformers cannot build this run's model \(AttributeError: .*vocab_size"
    ):
        require_fitting(folder, vocab_size=264, context_tokens_max=16)


def test_a_number_of_layers_that_nobody_uses_is_refused(folder: Path, build: Build) -> None:
    change(folder, num_hidden_layers=10**9)
    with pytest.raises(LocalError, match=r"num_hidden_layers is 1,000,000,000"):
        build(folder)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 264,
}


def of_architecture(folder: Path, architecture: str, model_type: str, **entries: object) -> Path:
    """Write the config.json of a small model of another architecture."""
    named = {"architectures": [architecture], "model_type": model_type, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(SMALL | named | entries))
    return folder


@pytest.mark.parametrize(
    ("architecture", "model_type", "entries"),
    [
        ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}),
        ("Qwen3ForCausalLM", "qwen3", {"tie_word_embeddings": True, "sliding_window": 4_096}),
        ("Qwen3ForCausalLM", "qwen3", {"tie_word_embeddings": False}),
        ("MistralForCausalLM", "mistral", {"sliding_window": None}),
        ("MistralForCausalLM", "mistral", {"sliding_window": 64, "max_position_embeddings": 64}),
        ("Gemma3ForCausalLM", "gemma3_text", {"sliding_window": 64, "max_position_embeddings": 64}),
        ("Qwen3MoeForCausalLM", "qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 24}),
    ],
)
def test_models_with_full_attention_over_all_positions_are_supported(
    tmp_path: Path, architecture: str, model_type: str, entries: dict[str, object]
) -> None:
    require_supported(of_architecture(tmp_path, architecture, model_type, **entries))


@pytest.mark.parametrize(
    ("architecture", "model_type", "reason"),
    [
        ("EmbeddingGemma", "gemma3_text", "architectures is EmbeddingGemma"),
        ("JambaForCausalLM", "jamba", "layers of kind .*linear_attention"),
        ("BloomForCausalLM", "bloom", "no attention but its own"),
        ("FalconForCausalLM", "falcon", "transformers cannot build this run's model"),
    ],
)
def test_architectures_that_cannot_be_trained_are_refused_by_new(
    tmp_path: Path, architecture: str, model_type: str, reason: str
) -> None:
    """Before, the trainer and the engines refused them when they started, or computed another model."""
    folder = of_architecture(tmp_path, architecture, model_type)
    for name, data in tiny_model_files(**SIZES).items():
        if name != "config.json":
            (folder / name).write_bytes(data)
    model = PretrainedModel(kind="pretrained", name_or_path=str(folder))
    with pytest.raises(LocalError, match=reason):
        make_model_files(model, tmp_path / "run")
