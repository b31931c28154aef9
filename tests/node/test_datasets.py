"""Datasets of question and answer: Parquet files, files of a hub, and answers compared as mathematics."""

from __future__ import annotations

from pathlib import Path

import pytest

from prime_node.adapters.environments.data_files import hub_file
from prime_node.adapters.environments.math_answers import is_same_math
from prime_node.cli.wire_environments import build_environments
from prime_node.cli.wire_new import pin_datasets
from prime_node.coordinator.new_run import RunConfig
from prime_node.envs.settings import EnvironmentSettings
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec, Option

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """Rows in the usual form of the hub: a worked answer with the result in a box."""
    path = tmp_path / "halves.parquet"
    rows = [
        {"problem": f"Half of {n}?", "solution": f"{n} / 2", "answer": rf"\frac{{{n}}}{{2}}"} for n in range(1, 100)
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("1/2", r"\frac{1}{2}", True),
        (r"So it is $\frac12$.", "0.5", True),
        (r"\boxed{42}", "42", True),
        ("The answer is 1,250", "1250", True),
        ("41", "42", False),
        ("", "42", False),
        ("no idea", "42", False),
        ("9" * 100 + "**" + "9" * 100, "3", False),  # this one would take too long to compute
    ],
)
def test_answers_are_compared_as_mathematics(answer: str, reference: str, same: bool) -> None:
    assert is_same_math(answer, reference) is same


def test_a_parquet_file_is_an_environment_once_its_bytes_are_pinned(halves: Path) -> None:
    spec = EnvironmentSpec(
        name="halves", id="parquet", options={"path": str(halves), "question_field": "problem", "compare": "math"}
    )
    pinned = pin_datasets(RunConfig(environments=(spec,)), EnvironmentSettings(data_folder=halves.parent)).environments
    assert pinned[0].options["digest"] == digest_of(halves.read_bytes())
    environment = build_environments(pinned, halves.parent)["halves"]
    number = int(environment.prompt(0).removeprefix("Half of ").removesuffix("?"))
    assert environment.score(0, f"That makes {number / 2}", finished=True) == 1.0
    assert environment.score(0, f"That makes {number}", finished=True) == 0.0
    assert len(environment.held_out(1_000)) > 5


def test_a_file_that_is_no_parquet_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1, or so it says")
    options: dict[str, Option] = {"path": str(path), "digest": digest_of(path.read_bytes())}
    with pytest.raises(LocalError, match="not a Parquet file"):
        build_environments([EnvironmentSpec(name="a", id="parquet", options=options)], tmp_path)


@pytest.mark.parametrize("path", ["hf://datasets/gsm8k", "hf://datasets/openai/gsm8k@main"])
def test_a_hubs_path_without_a_file_says_what_a_whole_one_looks_like(path: str) -> None:
    with pytest.raises(ValueError, match=r"OWNER/NAME\[@REVISION\]/FILE"):
        hub_file(path, bytes_max=0)


def test_a_file_of_the_hub_is_taken_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "0" * 40
    snapshot = tmp_path / "datasets--us--sums" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(commit)
    (snapshot / "train.jsonl").write_text("{}")
    assert hub_file("hf://datasets/us/sums/train.jsonl", bytes_max=0).read_text() == "{}"
    with pytest.raises(OSError, match="cannot download it"):
        hub_file("hf://datasets/us/sums/test.jsonl", bytes_max=0)
