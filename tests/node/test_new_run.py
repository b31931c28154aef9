"""`prime-node new`: a folder with keys, model files, a signed RunSpec and a join link."""

from __future__ import annotations

import json
import re
import shutil
import stat
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from prime_node.cli.coordinator import listening_port, unreachable
from prime_node.cli.new import make_run, new, write_join_link
from prime_node.cli.options import Options
from prime_node.cli.place import coordinator_hosts
from prime_node.cli.run_dir import RunDir
from prime_node.cli.shipped import config_path, read_calibration, shipped_calibration
from prime_node.coordinator.config import CoordinatorConfig
from prime_node.coordinator.new_run import RunConfig, fit_positions
from prime_node.trainer.config import TrainerConfig
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec, JoinLink, PinnedRun, open_run_spec
from prime_protocol.verify import LIKELIHOOD_RATIOS

DEMO = config_path("demo.toml")


GIVEN = ["run.async_level=0", "trainer.seed=3", "trainer.optimizer.beta2=0.9"]
LIGHT = '{name = "sums", id = "jsonl", options = {path = "sums.jsonl"}}'


@dataclass(frozen=True)
class Made:
    run_dir: RunDir
    run: PinnedRun

    def copied(self, to: Path) -> RunDir:
        shutil.copytree(self.run_dir.path, to)
        return RunDir(to)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The demo's run, which no test changes."""
    run_dir = RunDir(tmp_path_factory.mktemp("demo") / "run")
    return Made(run_dir, make_run(run_dir, Options(DEMO, GIVEN), config_file=DEMO))


@pytest.fixture
def light(tmp_path: Path) -> list[str]:
    """Assignments for a run with an environment that starts in a fraction of the time of the demo's."""
    data = tmp_path / "data" / "sums.jsonl"
    data.parent.mkdir()
    data.write_text("".join(f'{{"question": "2 + {n}?", "answer": "{2 + n}"}}\n' for n in range(20)))
    return [f"run.environments=[{LIGHT}]", f"environments.data_folder={data.parent}"]


def test_a_new_run_verifies_against_its_own_link(demo: Made, tmp_path: Path) -> None:
    run_dir = demo.copied(tmp_path / "run")
    link = write_join_link(run_dir, demo.run, url="http://127.0.0.1:8400")
    assert open_run_spec(run_dir.load_run().envelope, pinned=link.run).spec == demo.run.spec
    assert run_dir.join_link() == link
    for file in demo.run.spec.model_files:
        assert digest_of((run_dir.model / file.name).read_bytes()) == file.digest


def test_private_keys_are_for_their_owner_only(demo: Made) -> None:
    for role in ("root", "coordinator", "trainer", "validator"):
        assert stat.S_IMODE(demo.run_dir.key(role).stat().st_mode) == 0o600


def test_a_folder_that_holds_a_run_is_never_made_again(demo: Made) -> None:
    with pytest.raises(LocalError, match="already holds a run"):
        make_run(demo.run_dir, Options(DEMO, []), config_file=DEMO)


def test_a_folder_that_was_left_half_made_is_made_again(demo: Made, tmp_path: Path, light: list[str]) -> None:
    run_dir = demo.copied(tmp_path / "run")
    run_dir.run_spec.unlink()
    made = make_run(run_dir, Options(DEMO, light), config_file=DEMO)
    assert made.digest == run_dir.load_run().digest != demo.run.digest


def test_sequences_fit_into_the_positions_of_the_model(tmp_path: Path, light: list[str]) -> None:
    """The demonstration's model has 4,096 positions, and the default for prompts is 8,192 tokens."""
    options = Options(DEMO, ["run.completion_tokens_max=4000", *light])
    run = make_run(RunDir(tmp_path / "run"), options, config_file=DEMO)
    assert run.spec.limits.prompt_tokens_max == 96
    for number, (setting, name) in enumerate(
        (
            ("run.completion_tokens_max=4096", "completion_tokens_max: sequences of 4,097 tokens"),
            ("run.limits.prompt_tokens_max=4096", r"limits\.prompt_tokens_max: sequences of"),
        )
    ):
        with pytest.raises(LocalError, match=rf"{name}.*4,096 positions"):
            make_run(RunDir(tmp_path / str(number)), Options(DEMO, [setting]), config_file=DEMO)


def test_overrides_are_kept_beside_the_config(demo: Made) -> None:
    assert demo.run.spec.async_level == 0
    assert demo.run_dir.overrides() == GIVEN


def test_a_lost_config_of_a_run_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lost = RunDir(tmp_path)
    for file in (lost.run_spec, lost.config):
        file.touch()
    Options.of_run(str(tmp_path), None, [])
    assert not caplog.records
    lost.config.unlink()
    Options.of_run(str(tmp_path), None, [])
    assert f"{lost.config} is missing: put back a copy; without it, settings have their defaults" in caplog.text


def test_a_role_is_told_what_its_run_was_made_with_and_then_the_command_line(demo: Made, tmp_path: Path) -> None:
    folder = str(demo.run_dir.path)
    config = Options.of_run(folder, None, ["trainer.optimizer.beta2=0.8"]).load(TrainerConfig)
    assert (config.seed, config.optimizer.beta2, config.optimizer.lr) == (3, 0.8, 4e-4)
    empty = tmp_path / "other.toml"
    empty.touch()
    other = Options.of_run(folder, empty, []).load(TrainerConfig)
    assert other == Options.of_run("http://host:1/#" + "0" * 64, None, []).load(TrainerConfig) == TrainerConfig()


def test_settings_that_a_role_would_refuse_are_reported_before_a_run_is_made(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"\[trainer\] optimizer\.lrr: no such setting; did you mean lr\?"):
        new(tmp_path / "run", config=DEMO, assignments=["trainer.optimizer.lrr=3"])
    with pytest.raises(LocalError, match=r"--url my\.host"):
        new(tmp_path / "run", url="my.host", config=DEMO)
    others = ['run.coordinators=["https://b.example.org", "http://c.example.org"]']
    with pytest.raises(LocalError, match=r"TLS, so clients would not ask http://c\.example\.org of run\.coordinators"):
        new(tmp_path / "run", url="https://a.example.org", config=DEMO, assignments=others)
    assert not (tmp_path / "run").exists()


def test_a_pretrained_model_needs_weights_for_its_trainer(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("""[run]
model = { kind = "pretrained", name_or_path = "some/model" }
environments = [{ name = "spell", id = "reasoning_gym", options = { task = "spell_backward" } }]
""")
    with pytest.raises(LocalError, match=r'initial_weights = "some/model"'):
        new(tmp_path / "run", config=config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("url", "assignments", "named"),
    [
        ("http://my.host:8400", [], ["coordinator.host"]),
        ("http://my.host:8500", ["coordinator.host=0.0.0.0"], []),
        ("http://my.host:8500", ["coordinator.host=0.0.0.0", "coordinator.port=8400"], ["coordinator.port = 8500"]),
        ("https://my.host", [], ["coordinator.host", "coordinator.port = 443"]),
        ("http://my.host:8400", ["coordinator.host=0.0.0.0"], []),
        ("http://127.0.0.1:8400", [], []),
    ],
)
def test_a_link_that_leads_elsewhere_is_reported_to_the_operator(
    url: str, assignments: list[str], named: list[str]
) -> None:
    settings = Options(None, assignments).load(CoordinatorConfig)
    found = list(unreachable(JoinLink.parse(f"{url}/#{'0' * 64}"), settings))
    assert len(found) == len(named)
    assert all(setting in warning for setting, warning in zip(named, found, strict=True))


@pytest.mark.parametrize(("url", "hosts"), [("http://a", ("a", "b", "c")), ("https://a", ("a", "b"))])
def test_a_coordinator_answers_to_the_names_that_clients_ask(demo: Made, url: str, hosts: tuple[str, ...]) -> None:
    spec = demo.run.spec.model_copy(update={"coordinators": ("https://b", "http://c")})
    assert coordinator_hosts(JoinLink(url, demo.run.digest), replace(demo.run, spec=spec)) == hosts


@pytest.mark.parametrize(
    ("url", "assignments", "port"),
    [
        ("http://my.host:8500", [], 8500),
        ("http://my.host:8500", ["coordinator.port=8401"], 8401),
        ("http://my.host:8500", ["coordinator.port=0"], 0),
        ("https://my.host", [], 8400),
    ],
)
def test_a_coordinator_listens_where_the_join_link_leads(url: str, assignments: list[str], port: int) -> None:
    settings = Options(None, assignments).load(CoordinatorConfig)
    assert listening_port(JoinLink.parse(f"{url}/#{'0' * 64}"), settings) == port


def test_settings_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"\[run\.model\]"):
        make_run(RunDir(tmp_path / "run"), Options(DEMO, ["run.model.hidden_size=130"]), config_file=DEMO)


def test_a_dataset_is_pinned_by_its_digest_when_the_run_is_made(tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text('{"question": "2 + 2?", "answer": "4"}\n')
    config = tmp_path / "config.toml"
    config.write_text(f'[[run.environments]]\nname = "sums"\nid = "jsonl"\noptions = {{ path = "{data.name}" }}\n')
    run = make_run(
        RunDir(tmp_path / "run"), Options(config, [f"environments.data_folder={tmp_path}"]), config_file=config
    )
    assert run.spec.environments[0].options["path"] == "questions.jsonl"
    assert run.spec.environments[0].options["digest"] == digest_of(data.read_bytes())


def test_a_missing_dataset_is_named_with_its_path(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[[run.environments]]\nname = "sums"\nid = "jsonl"\noptions = { path = "nowhere.jsonl" }\n')
    options = Options(config, [f"environments.data_folder={tmp_path}"])
    with pytest.raises(LocalError, match=r"sums: .*nowhere\.jsonl"):
        make_run(RunDir(tmp_path / "run"), options, config_file=config)


def test_a_run_holds_the_shipped_calibration_where_it_covers_the_model(
    demo: Made, tmp_path: Path, light: list[str]
) -> None:
    assert demo.run.spec.checks.calibration == shipped_calibration().without(LIKELIHOOD_RATIOS)
    without = make_run(RunDir(tmp_path / "c"), Options(DEMO, ["run.calibration=none", *light]), config_file=DEMO)
    assert without.spec.checks.calibration is None


@pytest.mark.parametrize("choice", ["shipped", str(config_path("calibration.json"))])
@pytest.mark.parametrize("larger", ["run.model.num_layers=3", "run.model.hidden_size=256"])
def test_no_run_is_made_with_a_calibration_of_a_smaller_model(
    tmp_path: Path, light: list[str], choice: str, larger: str
) -> None:
    options = Options(DEMO, [f"run.calibration={choice}", larger])
    with pytest.raises(LocalError, match=r"smaller model.*run\.calibration=none"):
        make_run(RunDir(tmp_path / "run"), options, config_file=DEMO)
    allowed = Options(DEMO, ["run.calibration=none", larger, *light])
    assert make_run(RunDir(tmp_path / "run"), allowed, config_file=DEMO).spec.checks.calibration is None


def test_a_shipped_calibration_may_be_named_without_its_folder(
    tmp_path: Path, light: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = Options(DEMO, ["run.calibration=calibration-smollm2.json", *light])
    made = make_run(RunDir(tmp_path / "run"), options, config_file=DEMO)
    expected = read_calibration(config_path("calibration-smollm2.json")).without(LIKELIHOOD_RATIOS)
    assert made.spec.checks.calibration == expected
    with pytest.raises(LocalError, match=r"prime-node calibrate missing\.json"):
        make_run(RunDir(tmp_path / "other"), Options(DEMO, ["run.calibration=missing.json"]), config_file=DEMO)


def test_no_run_is_made_below_the_temperature_of_its_calibration(tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    file.write_text(shipped_calibration().model_copy(update={"temperature_min": 1.0}).model_dump_json())
    colder = [f"run.calibration={file}", "run.temperature=0.7"]
    with pytest.raises(LocalError, match=r"at temperature 1, above the run's 0.7; .*run\.calibration=auto"):
        make_run(RunDir(tmp_path / "run"), Options(DEMO, colder), config_file=DEMO)
    assert make_run(RunDir(tmp_path / "run"), Options(DEMO, colder[:1]), config_file=DEMO).spec.checks.calibration


@pytest.mark.slow
def test_a_run_that_no_calibration_covers_measures_its_own_and_the_next_one_reuses_it(
    tmp_path: Path, light: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The shipped calibration is of a model with two layers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = Options(DEMO, ["run.model.num_layers=3", "run.calibration_tokens=2000", *light])
    first = make_run(RunDir(tmp_path / "first"), options, config_file=DEMO).spec.checks.calibration
    shown = capfd.readouterr().out
    assert "no calibration is known for transformers/fp32/cpu judged by transformers/fp32/cpu" in shown
    assert re.search(r"[\d,]+ of 2,000 tokens, [\d.]+ minutes left", shown)
    assert first is not None
    assert [(pair.worker, pair.validator) for pair in first.pairs] == [("transformers/fp32/cpu",) * 2]
    assert (first.num_layers_max, first.temperature_min) == (3, 1.0)
    assert first.pairs[0].moments["square"].num_tokens >= 2_000
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npz")}
    again = make_run(RunDir(tmp_path / "again"), options, config_file=DEMO).spec.checks.calibration
    assert again == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.npz")} == kept


@pytest.mark.slow
def test_a_calibration_that_lacks_the_validator_arithmetic_is_extended(
    tmp_path: Path, light: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = [pair for pair in shipped_calibration().pairs if "fp32" in pair.validator]
    file = tmp_path / "calibration.json"
    file.write_text(shipped_calibration().model_copy(update={"pairs": tuple(kept)}).model_dump_json())
    given = [f"run.calibration={file}", "validator.dtype=bf16", "run.calibration_tokens=2000", *light]
    found = make_run(RunDir(tmp_path / "run"), Options(DEMO, given), config_file=DEMO).spec.checks
    assert found.validator_classes == {"transformers/fp32/cpu", "transformers/bf16/cpu"}
    assert found.calibration is not None
    assert len(found.calibration.pairs) == len(kept) + 1


@pytest.mark.slow
def test_no_run_is_made_if_its_calibration_cannot_be_measured(
    tmp_path: Path, light: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bounds = ["run.calibration_tokens=100000", "run.calibration_minutes=0.0001"]
    options = Options(DEMO, ["run.model.num_layers=3", *bounds, *light])
    with pytest.raises(LocalError, match=r"could not be measured here.*run\.calibration=none"):
        make_run(RunDir(tmp_path / "run"), options, config_file=DEMO)
    assert re.search(r"only [\d,]+ tokens .* needs 2,000: allow more minutes", " ".join(capfd.readouterr().err.split()))
    assert not RunDir(tmp_path / "run").exists


def test_a_new_run_says_how_it_is_started(tmp_path: Path, light: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    new(tmp_path / "my run", config=DEMO, assignments=light)
    output = capsys.readouterr().out
    for role in ("coordinator", "trainer", "validator"):
        assert f"  prime-node {role} '{tmp_path / 'my run'}'\n" in output
    assert f"  prime-node join '{RunDir(tmp_path / 'my run').join_link()}'\n" in output


def test_the_error_about_a_missing_config_names_an_example(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="copy an example") as refused:
        new(tmp_path / "run")
    assert str(DEMO) in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("field", "room"), [("max_position_embeddings", 964), ("n_positions", 964), ("other", 8_192)])
def test_prompts_fit_whatever_a_model_calls_its_positions(field: str, room: int) -> None:
    config = RunConfig(completion_tokens_max=60, environments=(EnvironmentSpec(name="sums", id="jsonl"),))
    assert fit_positions(config, json.dumps({field: 1_024}).encode()).prompt_tokens_max == room
    assert fit_positions(config, json.dumps({"text_config": {field: 1_024}}).encode()).prompt_tokens_max == room
