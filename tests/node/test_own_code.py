"""A run's own reward functions and environments: named by import path, imported from one folder, confined as others are."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from tests.source_tree import ROOT

from prime_node.adapters.environments.child import EnvironmentFailed
from prime_node.cli.wire_environments import build_environments, end_environments, start_environments
from prime_node.cli.wire_new import pin_datasets
from prime_node.coordinator.new_run import RunConfig
from prime_node.envs.settings import EnvironmentSettings
from prime_node.ports.environment import Environment, TurnEnvironment
from prime_protocol.errors import LocalError
from prime_protocol.rollout import Completion, FinishReason
from prime_protocol.run_spec import EnvironmentSpec, Option

EXAMPLES = ROOT / "examples"
TUTORIAL = ROOT / "docs" / "tutorials" / "reward.md"
ROWS = "".join(f'{{"question": "{n} + {n}?", "answer": "{2 * n}", "worth": 0.5}}\n' for n in range(50))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder of code and data."""
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "sums.jsonl").write_text(ROWS)
    return folder


def pinned(spec: EnvironmentSpec, folder: Path | None) -> tuple[EnvironmentSpec, ...]:
    settings = EnvironmentSettings(code_folder=folder, data_folder=folder)
    return pin_datasets(RunConfig(environments=(spec,)), settings).environments


def rewarded(reward: str = "mine:score", **options: Option) -> EnvironmentSpec:
    return EnvironmentSpec(name="sums", id="jsonl", options={"path": "sums.jsonl", "reward": reward, **options})


def built(code: Path, name: str, text: str, **options: Option) -> Environment:
    """Build an environment with the reward `score` of a module of this name and text, in this process."""
    (code / f"{name}.py").write_text(dedent(text))
    (spec,) = pinned(rewarded(f"{name}:score", **options), code)
    spec = spec.model_copy(update={"options": {**spec.options, "path": str(code / "sums.jsonl")}})
    return build_environments([spec], code, code=code)["sums"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", "def score(completion, answer, info): return info['worth'] * (completion == answer)"),
        ("dicts", "def score(completion, answer, info): return {'reward': info['worth'] * (completion == answer), 'x': 'y'}"),
        ("waits", ("import asyncio\nasync def score(completion, answer, info):\n"
         "    await asyncio.sleep(0)\n    return info['worth'] * (completion == answer)")),
        ("calls", ("class Own:\n    def __call__(self, completion, answer, info):\n"
         "        return info['worth'] * (completion == answer)\nscore = Own()")),
    ],
)  # fmt: skip
def test_a_reward_is_the_functions_own(code: Path, name: str, text: str) -> None:
    environment = built(code, name, text)
    assert environment.score(0, environment.answer(0), finished=True) == 0.5  # no share of it for being right
    assert environment.score(0, "no", finished=True) == 0.0


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("raises_at_import", "1 / 0", "importing raises_at_import raised ZeroDivisionError"),
        ("exits_at_import", "raise SystemExit(3)", "importing exits_at_import raised SystemExit"),
        ("needs_more", "import no_such_package", "No module named 'no_such_package'"),
        ("empty", "", "module empty has no 'score'"),
        ("number", "score = 3", "number:score is not callable: 3"),
        (
            "narrow",
            "def score(completion): return 1",
            r"narrow:score is defined as score\(completion\), but called as score\(completion, answer, info\)",
        ),
        (
            "keywords",
            "def score(*, completion, answer, info): return 1",
            "called as score.completion, answer, info.: too many",
        ),
        ("nothing", "def score(completion, answer, info): pass", "nothing:score returned None; a reward is a number from 0"),
        ("nan", "def score(completion, answer, info): return float('nan')", "nan:score returned nan; a reward is a number"),
        ("text", "def score(completion, answer, info): return '1'", "text:score returned '1'; a reward is a number"),
        ("far", "def score(completion, answer, info): return 7", "far:score returned 7; a reward is a number from 0 to 1"),
        ("other", "def score(completion, answer, info): return {'points': 1}", "a dict without the key \"reward\""),
        ("breaks", "def score(completion, answer, info): return info['x']", "breaks:score raised KeyError: 'x', on the"),
        ("json", "def score(completion, answer, info): return 1", "Python has another module json"),
    ],
)  # fmt: skip
def test_a_wrong_reward_function_is_explained_before_the_run_starts(
    code: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(LocalError, match=message):
        built(code, name, text)


def test_reward_and_compare_exclude_each_other(code: Path) -> None:
    with pytest.raises(LocalError, match="exclude each other"):
        built(code, "twice", "def score(completion, answer, info): return 1", compare="number")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing:score", "module 'missing' not found in "),
        ("mine.score", "is no import path"),
        ("../mine:score", "is no import path"),
        ("os:system", "module 'os' not found in "),
    ],
)
def test_code_comes_from_the_machines_code_folder_alone(code: Path, path: str, message: str) -> None:
    with pytest.raises(LocalError, match=message):
        pinned(rewarded(path), code)


def test_a_machine_without_a_code_folder_refuses_a_run_with_own_code(code: Path) -> None:
    with pytest.raises(LocalError, match=r"set environments\.code_folder"):
        pinned(rewarded(), None)


def test_a_run_keeps_to_the_code_that_it_was_made_with(code: Path) -> None:
    (code / "mine.py").write_text("def score(completion, answer, info): return 0.5\n")
    specs = pinned(rewarded(), code)
    (code / "mine.py").write_text("def score(completion, answer, info): return 1.0\n")
    with pytest.raises(LocalError, match="put back the code that the run was made with, or make a new run"):
        start_environments(specs, code, hidden=[], settings=EnvironmentSettings(code_folder=code, data_folder=code))


def test_own_code_is_confined_as_other_environments_are(code: Path, tmp_path: Path) -> None:
    """It reads its own folder, but no key next to it or in it, writes nothing there, and has no network."""
    keys = code / "keys"
    keys.mkdir()
    (keys / "trainer.key").write_text("secret")
    (tmp_path / "other").write_text("secret")
    (code / "helper.py").write_text("GOOD = 1.0\n")
    (code / "mine.py").write_text(
        dedent(f"""
        import asyncio
        import socket
        from pathlib import Path
        from helper import GOOD

        def refused(do):
            try:
                do()
            except OSError:
                return True

        async def score(completion, answer, info):
            await asyncio.sleep(0)
            here = Path({str(code)!r})
            return GOOD * all([
                (here / "sums.jsonl").read_text(),
                refused(lambda: (here / "keys" / "trainer.key").read_text()),
                refused(lambda: Path({str(tmp_path / "other")!r}).read_text()),
                refused(lambda: (here / "new.py").write_text("")),
                refused(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1)),
            ])
        """)
    )
    settings = EnvironmentSettings(code_folder=code, data_folder=code)
    made = start_environments(pinned(rewarded(), code), code, hidden=[keys], settings=settings)
    try:
        assert made["sums"].score(0, "an answer", finished=True) == 1.0
    finally:
        end_environments(made)
    assert not (code / "new.py").exists()


def test_own_code_is_found_in_a_folder_that_contains_the_runs(code: Path) -> None:
    """As in the tutorials. Not in /tmp, which the sandbox lets all environments list: the code's folder may not be listed."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        (folder / "runs").mkdir()
        (folder / "sums.jsonl").write_text(ROWS)
        (folder / "helper.py").write_text("GOOD = 1.0\n")
        (folder / "mine.py").write_text("from helper import GOOD\ndef score(completion, answer, info): return GOOD\n")
        (folder / "own").mkdir()
        (folder / "own" / "inner.py").write_text("def score(completion, answer, info): return 0.5\n")
        settings = EnvironmentSettings(code_folder=folder, data_folder=folder)
        specs = pinned(rewarded(), folder)
        (inner,) = pinned(rewarded("own.inner:score"), folder)
        specs = (*specs, inner.model_copy(update={"name": "inner"}))
        made = start_environments(specs, code, hidden=[folder / "runs"], settings=settings)
        try:
            assert made["sums"].score(0, "an answer", finished=True) == 1.0
            assert made["inner"].score(0, "an answer", finished=True) == 0.5
        finally:
            end_environments(made)


def test_the_other_numbers_of_a_dict_are_further_rewards(code: Path) -> None:
    (code / "mine.py").write_text(
        "def score(completion, answer, info):\n"
        "    return {'reward': 0.5, 'format': float(len(completion)), 'note': 'x', 'right': completion == answer}\n"
    )
    settings = EnvironmentSettings(code_folder=code, data_folder=code)
    (several,) = pinned(rewarded(), code)
    (code / "flat.py").write_text("def score(completion, answer, info): return 0.5\n")
    (one,) = pinned(rewarded("flat:score"), code)
    made = start_environments([several, one.model_copy(update={"name": "flat"})], code, hidden=[], settings=settings)
    try:
        world = made["sums"]
        assert world.parts(0, "four", finished=True) == {"format": 4.0, "right": 0.0}
        assert world.score(0, "four", finished=True) == 0.5
        assert world.parts(0, "four", finished=False) == {}
        with pytest.raises(EnvironmentFailed, match="further rewards are entries of a dict"):
            made["flat"].parts(0, "four", finished=True)
    finally:
        end_environments(made)


def example(name: str) -> tuple[EnvironmentSpec, ...]:
    tables: dict[str, Any] = tomllib.loads((EXAMPLES / name).read_text())
    return pinned(EnvironmentSpec.model_validate(tables["run"]["environments"][0]), EXAMPLES)


@pytest.fixture
def guess(model: Path) -> Iterator[TurnEnvironment]:
    made = start_environments(
        example("own_environment.toml"), model, hidden=[], settings=EnvironmentSettings(code_folder=EXAMPLES)
    )
    found = made["guess"]
    assert isinstance(found, TurnEnvironment)
    yield found
    end_environments(made)


def test_the_examples_reward_function_scores_in_the_confined_process(model: Path) -> None:
    made = start_environments(
        example("own_reward.toml"), model, hidden=[], settings=EnvironmentSettings(code_folder=EXAMPLES)
    )
    try:
        world = made["backward"]
        answer = world.answer(0)
        assert world.score(0, answer, finished=True) == 1.0
        assert world.score(0, answer[:1], finished=True) == 1 / len(answer)
        assert all(one.is_correct(world.answer(0), finished=True) is False for one in world.held_out(3))
    finally:
        end_environments(made)


def test_the_files_of_the_tutorial_on_rewards_are_an_environment(model: Path, tmp_path: Path) -> None:
    """`prime-node up` itself takes minutes: the questions, the config and the score are what could be wrong."""
    saved = re.findall(r"Save it as `([\w.]+)`:\n\n```\w+\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    for name, text in saved:
        (tmp_path / name).write_text(text)
    made = subprocess.run([sys.executable, "questions.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    (tmp_path / "questions.jsonl").write_text(made.stdout)
    tables = tomllib.loads((tmp_path / "reward.toml").read_text())
    assert RunConfig.load(tables).max_steps == tables["run"]["max_steps"]
    settings = EnvironmentSettings(code_folder=tmp_path, data_folder=tmp_path)
    spec = pinned(EnvironmentSpec.model_validate(tables["run"]["environments"][0]), tmp_path)
    worlds = start_environments(spec, model, hidden=[], settings=settings)
    try:
        world = worlds["backward"]
        answer = world.answer(0)
        assert len(answer) == 3
        assert world.score(0, answer, finished=True) == 1.0
        assert 0.0 < world.score(0, answer[:1] + "??", finished=True) < 1.0
        assert len(world.held_out(64)) == 64
    finally:
        end_environments(worlds)


def test_the_examples_environment_answers_the_model(guess: TurnEnvironment, model: Path) -> None:
    from prime_node.adapters.models.hf_tokenizer import HfTokenizer

    read = HfTokenizer(model)
    wanted = guess.answer(0)
    turns = iter([str((int(wanted) + 1) % 10), "x", wanted])

    async def ask(prompt: tuple[int, ...]) -> Completion:
        ids = (*read.encode(next(turns)), read.stop_token_id)
        return Completion(ids, tuple(-1.0 for _ in ids), FinishReason.STOP)

    assert asyncio.run(guess.play(0, tuple(read.encode_prompt(guess.prompt(0))), ask)) == 1.0
    assert next(turns, None) is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def problem(self, number): return {'question': 'a'}", 'a dict with texts "question" and "answer"'),
        ("def problem(self): return 1", r"mine:Own.problem is defined as Own.problem\(\)"),
        ("x = 1", "mine:Own.problem is missing"),
    ],
)
def test_a_wrong_class_is_explained(code: Path, body: str, message: str) -> None:
    (code / "mine.py").write_text(f"class Own:\n    def score(self, completion, answer, info): return 1\n    {body}\n")
    specs = pinned(EnvironmentSpec(name="own", id="python", options={"environment": "mine:Own"}), code)
    with pytest.raises(LocalError, match=message):
        start_environments(specs, code, hidden=[], settings=EnvironmentSettings(code_folder=code))
