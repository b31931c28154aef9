"""An answer is data: scorers that run it as code are refused."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reasoning_gym.factory import DATASETS

from prime_node.adapters.environments.math_answers import is_same_math
from prime_node.adapters.environments.reasoning_gym import RUNS_ANSWERS
from prime_node.cli.wire_environments import build_environments, end_environments, start_environments
from prime_node.envs.settings import EnvironmentSettings
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
    assert len(DATASETS) > 100
    evaluating = {name: found for name, (cls, _) in DATASETS.items() if (found := evaluators_of(cls))}
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
        [gym("n_queens")], tmp_path, hidden=[], settings=EnvironmentSettings(unsafe_answers_as_code=("task",))
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
