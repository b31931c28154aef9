"""Environments: the split, the reward, and the sources."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prime_node.adapters.environments.reasoning_gym import GYM, NEEDS
from prime_node.cli.wire_environments import build_environments
from prime_node.envs.dataset import is_same_number
from prime_node.envs.registry import Option
from prime_node.envs.split import Frame, is_held_out
from prime_node.ports.environment import Environment
from prime_protocol.assignment import HELD_OUT_START
from prime_protocol.digest import digest_of
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec

SPELLING: dict[str, Any] = {"task": "spell_backward", "min_word_len": 3, "max_word_len": 6}
TASKS = ["spell_backward", "chain_sum", "letter_counting", "count_bits", "simple_equations"]


def built(spec: EnvironmentSpec) -> Environment:
    return build_environments([spec], Path("no model"))[spec.name]


def gym(seed: int = 0, **options: Option) -> Environment:
    return built(EnvironmentSpec(name="gym", id="reasoning_gym", seed=seed, options=options))


def jsonl(path: Path, **options: Option) -> Environment:
    named = {"path": str(path), "digest": digest_of(path.read_bytes()), **options}
    return built(EnvironmentSpec(name="file", id=path.suffix.removeprefix("."), options=named))


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    lines = [{"question": f"What is {n} + {n}?", "answer": f"We add.\n#### {2 * n:,}"} for n in range(500, 700)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("task", TASKS)
def test_a_right_answer_earns_one_and_nothing_leaves_the_unit_interval(task: str) -> None:
    environment = gym(task=task)
    for index in range(20):
        answer = environment.answer(index)
        assert environment.score(index, answer, finished=True) == 1.0
        assert environment.score(index, answer, finished=False) == 0.0
        for wrong in ("", answer + "x", answer[:-1], "\N{REPLACEMENT CHARACTER}", "1e999", "nan"):
            assert 0.0 <= environment.score(index, wrong, finished=True) < 1.0


def test_a_held_out_problem_can_be_asked_for_by_its_number(sums: Path) -> None:
    for environment in (gym(**SPELLING), jsonl(sums, answer_after="####", compare="number")):
        problems = environment.held_out(12)
        for number in (11, 0, 7):
            index, problem = HELD_OUT_START + number, problems[number]
            assert environment.prompt(index) == problem.prompt
            answer = environment.answer(index)
            assert problem.is_correct(answer, finished=True)
            assert environment.score(index, answer, finished=True) == 1.0
            assert environment.score(index, "x", finished=True) == problem.score("x", finished=True) < 1.0
    with pytest.raises(ValueError, match="held-out problem 10000"):
        environment.prompt(HELD_OUT_START + 10_000)


@pytest.mark.parametrize("task", TASKS)
def test_training_and_evaluation_never_overlap(task: str) -> None:
    environment = gym(task=task)
    held_out = {problem.prompt for problem in environment.held_out(60)}
    assert len(held_out) == 60
    assert all(is_held_out(question) for question in held_out)
    assert not any(is_held_out(environment.prompt(index)) for index in range(300))


def test_problems_are_the_same_in_another_process() -> None:
    indices = [0, 1, 2**20, 2**48 - 1]
    program = (
        "from prime_node.adapters.environments.reasoning_gym import ReasoningGymSource as S\n"
        "from prime_node.envs.split import Judge, SplitEnvironment\n"
        "import json\n"
        f"made = [SplitEnvironment(Judge(S(task=task)), seed=3) for task in {TASKS!r}]\n"
        f"print(json.dumps([[[e.prompt(i), e.answer(i)] for i in {indices!r}] for e in made]))\n"
        "print(json.dumps([[p.prompt for p in e.held_out(5)] for e in made]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50)
    training, held_out = (json.loads(line) for line in ran.stdout.splitlines())
    here = [gym(seed=3, task=task) for task in TASKS]
    assert training == [[[e.prompt(i), e.answer(i)] for i in indices] for e in here]
    assert held_out == [[problem.prompt for problem in e.held_out(5)] for e in here]


def test_tasks_whose_packages_come_as_source_alone_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = re.compile(rf"^import ({'|'.join(set(NEEDS.values()))})\b", re.MULTILINE)
    folder = Path(GYM.__file__).parent
    found = {path.stem: name[1] for path in folder.rglob("*.py") if (name := importing.search(path.read_text()))}
    found["zebra_puzzles"] = found.pop("sat_utils")  # a part of their generator
    assert found == NEEDS
    monkeypatch.setattr("prime_node.adapters.environments.reasoning_gym.MISSING", set(NEEDS.values()))
    for task, package in NEEDS.items():
        with pytest.raises(LocalError, match=f"task '{task}' needs the package {package}.* install '{package}[=>]="):
            gym(task=task)
    assert gym(task="spell_backward").answer(1)


def test_the_demos_problems_are_these() -> None:
    # A change here changes every active run: verdicts would differ between releases.
    environment = gym(seed=7, **SPELLING)
    assert [environment.answer(index) for index in range(3)] == ["edanap", "eudnof", "esuks"]
    assert [problem.prompt.split()[-1] for problem in environment.held_out(3)] == ["antrum", "stoun", "tarsi"]


def test_the_seed_changes_training_but_not_evaluation() -> None:
    first, second = gym(seed=1, **SPELLING), gym(seed=2, **SPELLING)
    assert [first.prompt(i) for i in range(20)] != [second.prompt(i) for i in range(20)]
    assert [p.prompt for p in first.held_out(20)] == [p.prompt for p in second.held_out(20)]


def test_more_evaluation_problems_begin_with_the_same_ones() -> None:
    environment = gym(**SPELLING)
    assert [p.prompt for p in environment.held_out(30)][:10] == [p.prompt for p in environment.held_out(10)]


def test_half_of_the_reward_is_for_being_exactly_right() -> None:
    environment, whole = gym(**SPELLING), gym(exact_share=1.0, **SPELLING)
    answer = environment.answer(0)
    almost = answer[:-1] + ("a" if answer[-1] != "a" else "b")
    partial = (len(answer) - 1) / len(answer)
    assert environment.score(0, almost, finished=True) == pytest.approx(partial / 2)
    assert whole.score(0, almost, finished=True) == 0.0
    assert whole.score(0, answer, finished=True) == 1.0


def test_a_task_may_be_asked_in_other_words_and_graded_by_the_last_number() -> None:
    digits: dict[str, Any] = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    words: dict[str, Any] = {"question_field": "expression", "prefix": "What is ", "suffix": "?", "compare": "number"}
    environment, plain = gym(task="chain_sum", **digits, **words), gym(task="chain_sum", **digits)
    for problem, index in ((environment.held_out(3)[2].prompt, HELD_OUT_START + 2), (environment.prompt(0), 0)):
        first, sign, second = problem.removeprefix("What is ").removesuffix("?").split()
        value = int(first) + int(second) if sign == "+" else int(first) - int(second)
        assert environment.score(index, f"{first} {sign} {second} = {value}.", finished=True) == 1.0
        assert environment.score(index, f"{value} or {value + 1}", finished=True) == 0.0
    answer = plain.answer(0)
    assert 0.0 < plain.score(0, f"It is {answer}", finished=True) < 1.0, "the task's own scorer gives partial credit"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"compare": "nothing"}, "compare must be one of"),
        ({"question_field": "nothing"}, "no field 'nothing' among .*expression"),
        ({"score_cut_off": "yes"}, "score_cut_off must be true or false"),
    ],
)
def test_an_option_of_questions_and_scores_that_cannot_hold_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(LocalError, match=why):
        gym(task="chain_sum", **wrong)


def test_a_completion_that_was_cut_off_is_scored_only_where_the_run_says_so() -> None:
    strict, lenient = gym(task="chain_sum"), gym(task="chain_sum", score_cut_off=True)
    answer = strict.answer(0)
    assert strict.score(0, answer, finished=False) == 0.0
    assert lenient.score(0, answer, finished=False) == lenient.score(0, answer, finished=True) == 1.0
    assert lenient.held_out(1)[0].is_correct(lenient.answer(HELD_OUT_START), finished=False)


def test_an_evaluation_problem_is_correct_only_when_it_is_finished_and_exact() -> None:
    problem = gym(**SPELLING).held_out(1)[0]
    answer = problem.prompt.split()[-1][::-1]
    assert problem.is_correct(answer, finished=True)
    assert problem.score(answer, finished=True) == 1.0
    assert not problem.is_correct(answer, finished=False)
    assert not problem.is_correct(answer + "s", finished=True)


def test_a_frame_asks_for_tags_and_reads_the_last_ones() -> None:
    frame = Frame(prefix="Q: ", suffix=" Use <answer> tags.", answer_tag="answer")
    assert frame.ask("1 + 1?") == "Q: 1 + 1? Use <answer> tags."
    assert frame.read("<answer>1</answer> no, <answer> 2 </answer>.") == "2"
    assert frame.read("2") is None
    assert frame.read("<answer>2") is None
    assert frame.read(frame.write("2")) == "2"


def test_a_framed_environment_scores_the_text_in_the_tags() -> None:
    environment = gym(answer_tag="answer", **SPELLING)
    bare = gym(**SPELLING).answer(0)
    assert environment.answer(0) == f"<answer>{bare}</answer>"
    assert environment.score(0, f"Let me think. {environment.answer(0)}", finished=True) == 1.0
    assert environment.score(0, bare, finished=True) == 0.0


def test_a_file_of_questions_is_split_and_scored(sums: Path) -> None:
    environment = jsonl(sums, compare="number", answer_after="####")
    held_out = {problem.prompt for problem in environment.held_out(1_000)}
    trained = {environment.prompt(index) for index in range(3_000)}
    assert len(held_out) + len(trained) == 200
    assert not held_out & trained
    answer = environment.answer(0)
    assert environment.score(0, f"That makes {answer.replace(',', '')}.00 in all.", finished=True) == 1.0
    assert environment.score(0, f"{answer}1", finished=True) == 0.0


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        ("1,250.00 dollars", "1250", True),
        ("-3", "3", False),
        ("first 7, then 8", "8", True),
        (".5", "0.50", True),
        ("none", "8", False),
        ("8", "none", False),
        ("१२", "12", True),
        ("1" * 5_000, "1", False),
    ],
)
def test_numbers_are_compared_by_value(answer: str, reference: str, same: bool) -> None:
    assert is_same_number(answer, reference) is same


def test_text_is_compared_without_case_and_spacing(tmp_path: Path) -> None:
    path = tmp_path / "capitals.jsonl"
    path.write_text(
        '{"q": "France?", "a": "Paris"}\n\n{"q": "Peru?", "a": "Lima"}\n{"q": "Chad?", "a": "N\'Djamena"}\n'
    )
    environment = jsonl(path, question_field="q", answer_field="a")
    assert environment.score(0, f" {environment.answer(0).upper()}\n", finished=True) == 1.0
    assert environment.score(0, "London", finished=True) == 0.0


@pytest.mark.parametrize(
    ("environment_id", "options", "why"),
    [
        ("chess", {}, "no implementation 'chess'; known are jsonl, parquet, python, reasoning_gym"),
        ("reasoning_gym", {}, "missing a required argument: 'task'"),
        ("reasoning_gym", {"task": "mind_reading"}, "mind_reading"),
        ("reasoning_gym", {"task": "spell_backward", "colour": 1}, "colour"),
        ("reasoning_gym", {"task": "spell_backward", "min_word_len": 0}, "min_word_len"),
        ("reasoning_gym", {**SPELLING, "exact_share": 2.0}, "between 0 and 1"),
        ("jsonl", {"path": "/nonexistent", "digest": "0"}, "No such file"),
        ("jsonl", {"path": "x", "digest": "0", "compression": "gz"}, "compression"),
    ],
)
def test_a_wrong_description_says_what_is_wrong(environment_id: str, options: dict[str, Option], why: str) -> None:
    with pytest.raises(LocalError, match=why):
        built(EnvironmentSpec(name="e", id=environment_id, options=options))


@pytest.mark.parametrize(
    ("content", "options", "why"),
    [
        ('{"question": "a"}\n', {}, "line 1: no field 'answer' among question"),
        ("[]\n", {}, "line 1: needs a JSON object, got a list"),
        ("\n", {}, "holds no problems"),
        ('{"question": "a", "answer": "b"}\n', {"compare": "vibes"}, "text, number"),
        ('{"question": "a", "answer": "b"}\n', {"digest": "0" * 64}, "the run wants 0000"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, content: str, options: dict[str, Option], why: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(content)
    with pytest.raises(LocalError, match=why):
        jsonl(path, **options)


def test_a_source_whose_every_question_is_held_out_has_no_training_problems(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    question = next(q for n in range(100) if is_held_out(q := f"question {n}"))
    path.write_text(json.dumps({"question": question, "answer": "a"}) + "\n")
    with pytest.raises(ValueError, match="held out"):
        jsonl(path).prompt(0)
