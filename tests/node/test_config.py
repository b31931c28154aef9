"""Settings come from four sources, and a mistake in any of them is explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import BaseModel
from pydantic_settings import SettingsConfigDict
from tests.cases_world import check_each
from tests.node.operator_world import make_run_folder
from typer.testing import CliRunner

from prime_node.cli.config import all_settings, settings_toml
from prime_node.cli.main import app
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
    for variable in ("PRIME_SAMPLE_COUTN", "PRIME_SAMPEL_COUNT", "prime_sample_coutn", "PRIME_SAMPEL_COUTN__X"):
        with monkeypatch.context() as one:
            one.setenv(variable, "3")
            with pytest.raises(LocalError, match=rf"{variable}: no such setting; did you mean PRIME_SAMPLE_COUNT\?"):
                Sample.load()


def test_a_variable_that_resembles_no_setting_is_ignored_and_named_if_its_table_is_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variable in ("PRIME_SAMPLE_WAREHOUSE", "PRIME_RIB_COUNT", "PRIME_", "PRIME_COUNT", "PRIMER_SAMPLE_COUTN"):
        monkeypatch.setenv(variable, "3")
    assert Sample.load() == Sample()
    assert [record.args for record in caplog.records] == [("PRIME_SAMPLE_WAREHOUSE", "sample")]


def test_a_variable_of_another_table_is_no_misspelt_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = {table: (table.model_config["env_prefix"], list(table.model_fields)) for table in all_settings()}
    for prefix, fields in names.values():
        for field in fields:
            monkeypatch.setenv(f"{prefix}{field}".upper(), "x")
    refused = []
    for table in all_settings():
        with pytest.raises(LocalError) as caught:  # the values are wrong, not the names
            table.load()
        refused.append(str(caught.value))
    assert [text for text in refused if "no such setting" in text] == []
    assert caplog.records == []


def test_a_variable_that_is_no_json_where_it_must_be_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIME_SAMPLE_INNER", "{")
    with pytest.raises(LocalError, match=r'environment variables of \[sample\]: .*"inner"'):
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
    lines = list(settings_toml(settings, None, (settings.section,)))
    assert [line for line in lines if line.startswith("# (") or line == "# "] == []
    assert settings.section in SECTIONS
    assert lines[0] == f"[{settings.section}]"


def printed(*arguments: object) -> str:
    ran = CliRunner().invoke(app, ["config", *map(str, arguments)], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    return ran.stdout


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_printed_settings_are_a_file_with_the_same_settings(path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.toml"
    again.write_text(printed("--config", path, "--origin"))
    given, read = Options(path, []), Options(again, [])
    for settings in all_settings():
        if settings.section != "run" or "run" in given.tables:
            assert read.load(settings) == given.load(settings)


def test_the_printed_defaults_are_a_valid_file(tmp_path: Path) -> None:
    again = tmp_path / "again.toml"
    again.write_text(printed())
    for settings in all_settings():
        if settings.section != "run":  # it has no default environments
            assert Options(again, []).load(settings) == settings.load()


def test_a_setting_shows_its_meaning_its_range_and_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.toml").write_text("[coordinator]\ngrace_seconds = 7\n")
    monkeypatch.setenv("PRIME_COORDINATOR_HOST", "::1")
    text = printed("coordinator", "-c", tmp_path / "own.toml", "-s", "coordinator.port=1234", "--origin")
    lines = text.splitlines()
    assert f"grace_seconds = 7.0  # from {tmp_path}/own.toml" in lines
    assert 'host = "::1"  # from the environment' in lines
    assert "port = 1234  # from --set" in lines
    assert lines[lines.index("port = 1234  # from --set") - 1].endswith("(at least 0; at most 65,535)")
    assert 'selection = "' in printed("run")
    assert "(one of '" in printed("run")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_schema_accepts_every_config_and_no_misspelt_setting(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    schema = json.loads(printed("--schema"))
    jsonschema.Draft202012Validator.check_schema(schema)
    table = read_toml(path)
    jsonschema.validate(table, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(table | {"worker": {"thread": 1}}, schema)


def test_a_setting_that_a_command_does_not_read_is_refused(tmp_path: Path) -> None:
    cases = {
        "join": ("join", f"http://127.0.0.1:1/#{'0' * 64}", "--set", "trainer.seed=1"),
        "seed": ("seed", f"http://127.0.0.1:1/#{'0' * 64}", "--set", "up.port=1"),
        "coordinator": ("coordinator", make_run_folder(tmp_path / "run"), "--set", "worker.threads=1"),
    }

    def refused(arguments: tuple[object, ...]) -> None:
        with pytest.raises(LocalError, match="would be ignored"):
            CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)

    check_each(cases.items(), refused)
    own = tmp_path / "own.toml"
    own.write_text("")
    arguments = ["coordinator", str(tmp_path / "run"), "-c", str(own), "--set", "run.max_steps=10"]
    with pytest.raises(LocalError, match="signed and fixed"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
