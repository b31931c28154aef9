"""A run's config.json may be broken, hostile or too large: each case gives a one-line error, and no code in it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prime_node.adapters.models.causal_model import CausalModel
from prime_node.adapters.models.model_config import require_within
from prime_node.adapters.models.tiny_model import tiny_model_files
from prime_node.adapters.training.torch_backend import TorchBackend
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


def test_a_number_of_layers_that_nobody_uses_is_refused(folder: Path, build: Build) -> None:
    change(folder, num_hidden_layers=10**9)
    with pytest.raises(LocalError, match=r"num_hidden_layers is 1,000,000,000"):
        build(folder)
