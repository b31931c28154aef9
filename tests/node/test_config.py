"""Settings come from four sources, and a mistake in any of them is explained."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import BaseModel
from pydantic_settings import SettingsConfigDict

from prime_node.cli.config import all_settings, describe_settings
from prime_node.cli.options import SECTIONS, Options
from prime_node.config import Settings, check_sections, parse_overrides, read_toml
from prime_protocol.errors import LocalError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))


class Inner(BaseModel):
    rate: float = 0.5
    name: str = "x"


class Sample(Settings):
    model_config = SettingsConfigDict(env_prefix="PRIME_SAMPLE_")
    section: ClassVar[str] = "sample"
    count: int = 1
    size: float = 2.0
    inner: Inner = Inner()


def test_command_line_beats_environment_beats_file_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_SAMPLE_COUNT", "3")
    monkeypatch.setenv("PRIME_SAMPLE_SIZE", "3")
    file = {"sample": {"count": 2, "inner": {"name": "file"}}}
    loaded = Sample.load(file, {"size": 9})
    assert (loaded.count, loaded.size, loaded.inner.name, loaded.inner.rate) == (3, 9.0, "file", 0.5)


def test_a_misspelt_variable_is_refused_with_the_likely_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_SAMPLE_COUTN", "3")
    with pytest.raises(LocalError, match=r"PRIME_SAMPLE_COUTN: \[sample\] .* did you mean PRIME_SAMPLE_COUNT\?"):
        Sample.load()


def test_nested_settings_are_merged_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_SAMPLE_INNER__RATE", "0.25")
    loaded = Sample.load({"sample": {"inner": {"name": "file"}}})
    assert loaded.inner == Inner(rate=0.25, name="file")


def test_an_unknown_setting_is_named_with_its_table() -> None:
    with pytest.raises(LocalError, match=r"\[sample\] cuont: no such setting; did you mean count\?"):
        Sample.load({"sample": {"cuont": 1}})


def test_an_unknown_table_is_named_with_the_known_ones() -> None:
    with pytest.raises(LocalError, match=r"\[worekr\].*worker"):
        check_sections({"worekr": {}}, SECTIONS, path=Path("x.toml"))


def test_a_broken_file_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[run]\nname = \n")
    with pytest.raises(LocalError, match="line 2"):
        read_toml(path)


def test_overrides_are_toml_values_or_text() -> None:
    parsed = parse_overrides(["a.b=3", "a.c.d=[1, 2]", "a.e=plain text", "f.g=true"])
    assert parsed == {"a": {"b": 3, "c": {"d": [1, 2]}, "e": "plain text"}, "f": {"g": True}}


@pytest.mark.parametrize("text", ["novalue", "x=1", ".a=1", "a.=1"])
def test_an_override_that_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(LocalError, match=r"section\.name=value"):
        parse_overrides([text])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    options = Options(path, [])
    for settings in all_settings():
        if settings.section != "run" or "run" in options.tables:
            options.load(settings)


def test_configs_are_shipped() -> None:
    assert {"demo.toml"} <= {path.name for path in CONFIGS}


@pytest.mark.parametrize("settings", all_settings(), ids=lambda settings: settings.section)
def test_every_setting_is_explained(settings: type[Settings]) -> None:
    unexplained = [name for name, field in settings.model_fields.items() if not field.description]
    assert unexplained == []
    assert settings.section in SECTIONS
    assert next(iter(describe_settings(settings, settings.section))) == f"[{settings.section}]"
