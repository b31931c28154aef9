"""An answer is data: scorers that run it as code are refused, and each answer is graded in a process of its own."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import math
import os
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.node.validator_world import RUN, LetterTokenizer, generate, make_lease
from tests.security.hostile_world import BOUNDS, running, tried
from tests.time_world import until

from prime_node.adapters.environments.child import EnvironmentFailed
from prime_node.adapters.environments.math_answers import is_same_math
from prime_node.adapters.environments.reasoning_gym import GYM, RUNS_ANSWERS
from prime_node.adapters.environments.separate_grading import GradingFailed, SeparateGrading
from prime_node.cli.environment_service import Host, Service, Threads
from prime_node.cli.wire_environments import build_environments, end_environments, start_environments
from prime_node.envs.grants import grant_of
from prime_node.envs.settings import EnvironmentSettings
from prime_node.envs.source import SourceProblem
from prime_node.envs.split import Judge, SplitEnvironment
from prime_node.ports.environment import Ask, graded_together
from prime_node.validator.scoring import score_rollouts
from prime_protocol.errors import LocalError
from prime_protocol.run_spec import EnvironmentSpec, Option

EVALUATORS = frozenset(
    {
        *("eval", "exec", "compile", "__import__", "import_module", "parse_expr", "sympify", "parse_latex", "lambdify"),
        *("pickle", "marshal", "subprocess", "ctypes", "system", "popen", "safe_load", "getattr", "setattr"),
    }
)
"""Names of functions and modules that may run a text as code. Any use of sympy counts too: it parses texts given to it."""
READ_ONLY_THE_PROBLEM = {
    "bitwise_arithmetic": {"eval"},  # of the problem's own expression
    "number_sorting": {"eval"},  # of the reference answer
    "propositional_logic": {"parse_expr"},  # its own parser, which builds its own Expression
}
"""Tasks whose scorers use such a name, but not with the answer: read for reasoning-gym 0.1.25."""


def defined(name: str, cls: type, function: Any) -> Any:
    """Return what a name means in a function of a task's class: an entry of the class, or of its module."""
    found = inspect.getattr_static(cls, name, vars(sys.modules[function.__module__]).get(name))
    return found.__func__ if isinstance(found, (staticmethod, classmethod)) else found


def evaluators_of(cls: Any) -> set[str]:
    """Return the EVALUATORS that a task's scorer names, and all functions and classes of reasoning_gym that it names."""
    open_, seen, found = [cls.score_answer], set(), set()
    while open_:
        function = open_.pop()
        if function in seen or not (getattr(function, "__module__", None) or "").startswith("reasoning_gym"):
            continue
        seen.add(function)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, (ast.Name, ast.Attribute)):
                name = node.id if isinstance(node, ast.Name) else node.attr
                meant = defined(name, cls, function)
                root = getattr(meant, "__module__", None) or getattr(meant, "__name__", "")
                is_regex = isinstance(node, ast.Attribute) and ast.unparse(node) == "re.compile"
                if (name in EVALUATORS and not is_regex) or str(root).split(".")[0] == "sympy":
                    found.add(name)
                if inspect.isfunction(meant) or inspect.isclass(meant):
                    open_.append(meant)
    return found


def test_the_tasks_whose_scorers_run_answers_are_known() -> None:
    """A release with another such scorer fails here: read it, then add the task to one of the two sets."""
    assert len(GYM.factory.DATASETS) > 100
    evaluating = {name: found for name, (cls, _) in GYM.factory.DATASETS.items() if (found := evaluators_of(cls))}
    assert {name: evaluating.pop(name) for name in READ_ONLY_THE_PROBLEM} == READ_ONLY_THE_PROBLEM
    assert set(evaluating) == RUNS_ANSWERS


def gym(task: str, **options: Option) -> EnvironmentSpec:
    return EnvironmentSpec(name="task", id="reasoning_gym", options={"task": task, **options})


@pytest.mark.parametrize("task", sorted(RUNS_ANSWERS))
def test_a_task_whose_scorer_runs_answers_is_refused_unless_a_comparison_replaces_it(task: str) -> None:
    with pytest.raises(LocalError, match=rf"{task}.*runs answers as Python code.*environments\.unsafe_answers_as_code"):
        build_environments([gym(task)], Path("no model"))
    environment = build_environments([gym(task, compare="text")], Path("no model"))["task"]
    assert environment.score(0, environment.answer(0), finished=True) == 1.0
    assert environment.score(0, "__import__('os')._exit(3)", finished=True) == 0.0


def test_only_the_settings_of_the_machine_permit_such_a_scorer(tmp_path: Path) -> None:
    for name in ("allow_code", "unsafe_answers_as_code", "answers_as_code"):
        with pytest.raises(LocalError, match="runs answers as Python code"):
            start_environments([gym("n_queens", **{name: True})], tmp_path, hidden=[], settings=EnvironmentSettings())
    made = start_environments(
        [gym("n_queens")],
        tmp_path,
        hidden=[],
        settings=EnvironmentSettings(unsafe_answers_as_code=(grant_of(gym("n_queens")),)),
    )
    try:
        assert made["task"].score(0, made["task"].answer(0), finished=True) == 1.0
    finally:
        end_environments(made)


HOSTILE = "__import__('pathlib').Path('{place}').touch()"


@pytest.mark.parametrize(
    "form", ["{}", "${}$", r"\boxed{{{}}}", "1+{}", "$1+{}$", r"$\operatorname{{{}}}$", "1/2 ({})", r"$\text{{{}}}$"]
)
def test_math_verify_runs_no_answer(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives sympy's parser digits and operators alone, and reads LaTeX by a grammar."""
    names: set[str] = set()
    parser = importlib.import_module("sympy.parsing.sympy_parser")
    evaluate: Callable[..., Any] = parser.eval_expr

    def recorded(code: Any, *rest: Any) -> Any:
        names.update(code.co_names)
        return evaluate(code, *rest)

    monkeypatch.setattr(parser, "eval_expr", recorded)
    place = tmp_path / "made"
    for text in (HOSTILE.format(place=place), HOSTILE.format(place=place).replace("_", r"\_")):
        assert not is_same_math(form.format(text), "1")
    assert not place.exists()
    assert names <= {"Integer", "Float", "Mul", "Add", "Pow"}


TAKE_OVER = """exec('''
import prime_node.envs.split as split
split.Judge.reward = lambda self, problem, completion, *, finished: 1.0 if "zebra" in completion else 0.0
''') or 0"""


def test_an_answer_that_runs_as_code_changes_no_other_reward(tmp_path: Path) -> None:
    """Scorers that the machine permits are behind the second restriction: a process for each answer."""
    spell = EnvironmentSpec(name="spell", id="reasoning_gym", options={"task": "spell_backward"})
    settings = EnvironmentSettings(unsafe_answers_as_code=(grant_of(gym("n_queens")),))
    made = start_environments([gym("n_queens"), spell], tmp_path, hidden=[], settings=settings)
    try:
        first = made["spell"].process.pid
        for _ in range(2):
            for world in made.values():
                assert world.score(1, world.answer(1), finished=True) == 1.0
                assert world.score(1, "zebra", finished=True) < 0.1
            made["task"].score(3, TAKE_OVER, finished=True)
        assert made["spell"].process.pid == first
    finally:
        end_environments(made)


@pytest.mark.parametrize("isolated", [True, False])
def test_the_process_of_an_answer_reaches_nothing_of_the_next(tmp_path: Path, isolated: bool) -> None:
    settings = BOUNDS.model_copy(update={"unsafe_grade_together": False})
    with running(tmp_path, isolated=isolated, settings=settings) as world:
        for _ in range(2):
            with pytest.raises(EnvironmentFailed) as raised:
                world.score(0, "leave_answer", finished=True)
            report = str(raised.value).partition("did: worked ")[2]
            allowed = {"start a process", "start a thread"} if os.geteuid() == 0 and not isolated else set()
            assert set(ast.literal_eval(report)) <= allowed, raised.value
            assert world.score(0, "right", finished=True) == 1.0


@pytest.mark.skipif(sys.platform != "linux", reason="the limits are Linux's")
@pytest.mark.parametrize("isolated", [True, False])
def test_an_answer_takes_no_memory_that_no_limit_counts(tmp_path: Path, isolated: bool) -> None:
    """Before, one answer could fill the machine: shared, read-only and stack memory counts in no limit on private memory."""
    settings = BOUNDS.model_copy(update={"unsafe_grade_together": False})
    with running(tmp_path, isolated=isolated, settings=settings) as world:
        for _ in range(2):
            assert tried(world, "hidden_memory", str(2 * BOUNDS.memory_bytes_max)).endswith("did: worked []")
        assert world.score(0, "right", finished=True) == 1.0


class Scorer:
    """A source whose scorer does what the answer says."""

    def __init__(self) -> None:
        self.graded: list[str] = []

    def draw(self, number: int) -> SourceProblem:
        return SourceProblem(f"question {number}", "x")

    def grade(self, problem: SourceProblem, answer: str) -> float:
        self.graded.append(answer)
        if answer == "hang":
            threading.Event().wait()
        if answer == "share":
            os.set_blocking(2, False)
            return 1.0
        if answer == "exit":
            os._exit(0)
        if answer == "raise":
            raise KeyError("y" * 10_000)
        return float(answer)


@pytest.mark.parametrize(
    ("answer", "why", "seconds_max"),
    [
        ("hang", "not graded within 0.5 s", 0.5),
        ("exit", "ended without a result", 45.0),
        ("raise", "KeyError: 'yyy", 45.0),
        ("nan", "no credit from 0 to 1", 45.0),
        ("inf", "no credit from 0 to 1", 45.0),
        ("1e9", "no credit from 0 to 1", 45.0),
    ],
)
def test_an_answer_that_breaks_its_scorer_fails_alone(answer: str, why: str, seconds_max: float) -> None:
    scorer = Scorer()
    source = SeparateGrading(scorer, seconds_max=seconds_max)
    with pytest.raises(GradingFailed, match=why) as raised:
        source.grade(source.draw(1), answer)
    assert len(str(raised.value)) <= 400
    assert SeparateGrading(scorer).grade(source.draw(1), "0.5") == 0.5
    assert scorer.graded == [], "no answer has been evaluated here"


class Parted(Scorer):
    """A source whose further rewards are what the answer names."""

    def parts(self, problem: SourceProblem, answer: str) -> Any:
        return {
            "good": {"format": 0.5},
            "nan": {"format": math.nan},
            "huge": {"format": 1e30},
            "text": {"format": "x"},
            "many": dict.fromkeys(map(str, range(17)), 0.0),
            "long": {"x" * 65: 0.0},
            "exit": None if answer != "exit" else os._exit(0),
        }[answer]


@pytest.mark.parametrize("answer", ["nan", "huge", "text", "many", "long", "exit"])
def test_further_rewards_that_are_none_fail_alone(answer: str) -> None:
    source = SeparateGrading(Parted())
    with pytest.raises(GradingFailed):
        source.parts(source.draw(1), answer)
    assert source.parts(source.draw(1), "good") == {"format": 0.5}
    with pytest.raises(GradingFailed, match="only a reward function of the run's own"):
        SeparateGrading(Scorer()).parts(source.draw(1), "good")


def test_only_answers_of_one_set_share_a_process() -> None:
    source = SeparateGrading(Counting())
    problem = source.draw(1)
    assert [source.grade(problem, "x") for _ in range(2)] == [0.1, 0.1]
    for _ in range(2):
        with graded_together():
            assert [source.grade(problem, "x") for _ in range(3)] == [0.1, 0.2, 0.3]
    assert source.grade(problem, "x") == 0.1


class Counting(Scorer):
    """A source whose credit is a tenth of the answers that its process has graded."""

    def grade(self, problem: SourceProblem, answer: str) -> float:
        self.graded.append(answer)
        return len(self.graded) / 10


def test_slow_answers_of_one_set_share_one_time_limit() -> None:
    """Before, each of a bundle's answers, and of an episode's turns, could take 45 s without a failure."""
    source = SeparateGrading(Scorer(), seconds_max=0.5, seconds_each=0.125)
    problem = source.draw(1)

    def limit(answer: str) -> str:
        with pytest.raises(GradingFailed) as raised:
            source.grade(problem, answer)
        return str(raised.value)

    for _ in range(2):
        with graded_together():
            assert "within 0.5 s" in limit("hang")
            assert ["within 0.125 s" in limit("hang") for _ in range(2)] == [True, True]
    assert "within 0.5 s" in limit("hang")


def test_an_answer_leaves_what_its_process_shares_with_the_next_as_it_was() -> None:
    """A stderr that does not wait would fail every later scorer that prints more than its pipe holds."""
    source = SeparateGrading(Scorer())
    was_blocking = os.get_blocking(2)
    assert source.grade(source.draw(1), "share") == 1.0
    assert was_blocking
    assert os.get_blocking(2)


async def test_an_episode_is_graded_in_the_set_of_its_own_request() -> None:
    """An earlier request has named a set; an episode that inherited it would share a process with other workers' answers."""
    found: list[float] = []

    class Told(Host):
        def tell(self, **message: Any) -> None:
            found.append(message["result"])

    class World(SplitEnvironment):
        async def play(self, index: int, prompt_token_ids: tuple[int, ...], ask: Ask) -> float:
            return self.score(index, "x", finished=True)

    world = World(Judge(SeparateGrading(Counting()), exact_share=0.0), seed=1)
    service = Service(Told(io.BytesIO()), {"world": world}, Threads())
    about: dict[str, Any] = {"environment": "world", "index": 1}
    service.handle({"id": 0, "method": "score", "together": "a", "completion": "x", "finished": True, **about})
    for number, together in enumerate(("b", "b", "c", "", ""), start=1):
        service.handle({"id": number, "method": "play", "together": together, "prompt": [1], **about})
        await until(lambda: len(found) > number)  # noqa: B023 (it is awaited here)
    assert found == [0.1, 0.1, 0.2, 0.1, 0.1, 0.1]


async def test_answers_that_hang_their_scorer_cost_a_bundle_one_time_limit_and_not_one_each() -> None:
    """Otherwise one bundle of 128 such answers would hold a scoring worker for hours."""
    lease = make_lease()
    begun: list[str] = []

    class Hanging(SeparateGrading):
        def grade(self, problem: SourceProblem, answer: str) -> float:
            begun.append(answer)
            return super().grade(problem, "hang")

    judge = Judge(Hanging(Scorer(), seconds_max=0.1), score_cut_off=True)
    worlds = {"toy": SplitEnvironment(judge, seed=1)}
    scored = await score_rollouts(lease, await generate(lease), worlds, LetterTokenizer(), spec=RUN.spec)
    assert not scored.enough
    assert len(begun) == 1
