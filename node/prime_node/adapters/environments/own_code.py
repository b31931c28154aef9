"""A run's own Python code: a reward function, or an environment of up to three methods, named "module:object" in a RunSpec.

Roles find the code in `[environments] code_folder` of this machine's own settings and compare its digest with the run's. Only
the confined process of environments imports it.

    def score(completion, answer, info) -> float | dict           also async; a dict needs the key "reward"

    class Mine:
        def __init__(self, **options)
        def problem(self, number) -> dict                           "question", "answer" and more; the same on every machine
        def score(self, completion, answer, info) -> float | dict   also async
        def reply(self, completions, answer, info) -> str | None    several turns: what the model reads next; None ends it
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from prime_node.envs.partners import Grade, Partner
from prime_node.envs.source import ProblemSource, SourceProblem
from prime_node.envs.split import is_held_out
from prime_node.inside import place
from prime_protocol import limits
from prime_protocol.digest import digest_of

NAMING_OPTIONS = ("reward", "environment")
"""Options that name own code."""
_PATH = re.compile(r"([A-Za-z_]\w*)((?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")
FIRST_PROBLEMS = 1_000
"""Problems among which the first of training is looked for."""
EXAMPLE = "my_rewards:score"


def own_paths(options: Mapping[str, Any]) -> list[str]:
    """List the import paths that an environment's options name."""
    return [str(options[name]) for name in NAMING_OPTIONS if name in options]


def digest_of_code(paths: Sequence[str], folder: Path | None) -> str:
    """Return the digest of the modules or packages that contain these objects. Raises ValueError and OSError."""
    files: dict[str, str] = {}
    for path in paths:
        for file in _files_of(path, folder):
            files[file.relative_to(_given(folder)).as_posix()] = digest_of(file.read_bytes())
    return digest_of(json.dumps(files, sort_keys=True).encode())


def _given(folder: Path | None) -> Path:
    if folder is None:
        raise ValueError("a run's own code is imported from one folder of this machine: set environments.code_folder")
    return folder


def _files_of(path: str, folder: Path | None) -> list[Path]:
    match = _PATH.fullmatch(path)
    if match is None:
        raise ValueError(f'{path!r} is no import path; write it as "module:object", for example "{EXAMPLE}"')
    module = place(_given(folder), match[1])
    found = [module.with_suffix(".py")] if module.with_suffix(".py").is_file() else sorted(module.rglob("*.py"))
    if not found:
        raise ValueError(f"{path}: module {match[1]!r} not found in {folder} (environments.code_folder)")
    return found


class _OwnModules(MetaPathFinder):
    """Finds a folder's modules by name: Python's own finder lists the folder, which the sandbox refuses if it contains keys."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a top-level module or package."""
        if "." in name:
            return None
        package = place(self.folder, name)
        if (start := package / "__init__.py").is_file():
            return spec_from_file_location(name, start, submodule_search_locations=[str(package)])
        if (file := package.with_suffix(".py")).is_file():
            return spec_from_file_location(name, file)
        if not package.is_dir():
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(package)]
        return spec


def load_object(path: str, folder: Path | None) -> Any:
    """Import the object. Raises ValueError that says what is wrong with the code."""
    _files_of(path, folder)
    module_name, _, name = path.partition(":")
    if not any(isinstance(one, _OwnModules) and one.folder == folder for one in sys.meta_path):
        sys.meta_path.append(_OwnModules(_given(folder)))  # last: it replaces no module of anyone else
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the code is not ours
        raise ValueError(f"{path}: importing {module_name} raised {_brief(error)}") from error
    origin = Path(module.__file__ or "/")
    if not origin.resolve().is_relative_to(_given(folder).resolve()):
        raise ValueError(f"{path}: Python has another module {module_name} ({origin}); rename yours")
    if not hasattr(module, name):
        raise ValueError(f"{path}: module {module_name} has no {name!r}")
    return getattr(module, name)


def _number(found: Any) -> float:
    """Return a value of a stranger's code as a number; NaN if it is none."""
    try:
        return math.nan if found is None or isinstance(found, str | bytes) else float(found)
    except (TypeError, ValueError, OverflowError):
        return math.nan


class OwnReward:
    """A reward function, called as score(completion, answer, info). Example: OwnReward("my_rewards:score", score)."""

    def __init__(self, path: str, function: object) -> None:
        """Raises ValueError if it cannot be called in that way."""
        self._path = path
        self._function = _callable(path, function, "completion, answer, info")

    def __call__(self, completion: str, problem: SourceProblem) -> float:
        """Return the reward. Raises ValueError for anything that is no number from 0 to 1."""
        found = self._called(completion, problem)
        if isinstance(found, Mapping):
            if "reward" not in found:
                raise ValueError(f'{self._path} returned a dict without the key "reward": {_shown(found)}')
            found = found["reward"]
        reward = _number(found)
        if not 0.0 <= reward <= 1.0:
            raise ValueError(f"{self._path} returned {_shown(found)}; a reward is a number from 0 to 1")
        return reward

    def parts(self, completion: str, problem: SourceProblem) -> dict[str, float]:
        """Return the numbers of the dict besides the reward, but for infinite and huge ones. Raises ValueError without a dict."""
        found = self._called(completion, problem)
        if not isinstance(found, Mapping):
            raise ValueError(f"{self._path} returned {_shown(found)}; further rewards are entries of a dict")
        numbers = {str(name): _number(value) for name, value in found.items() if name != "reward"}
        return {name: value for name, value in numbers.items() if abs(value) <= limits.REWARD_MAX}

    def _called(self, completion: str, problem: SourceProblem) -> Any:
        found = self._function(completion, problem.answer, dict(problem.entry))
        return _finished(found) if inspect.iscoroutine(found) else found

    def try_out(self, source: ProblemSource) -> None:
        """Score the reference answer of the first training problem, unless the function is async. Raises ValueError."""
        if inspect.iscoroutinefunction(self._function):
            return  # it may ask a judge
        problems = map(source.draw, range(FIRST_PROBLEMS))
        problem = next((one for one in problems if not is_held_out(one.question)), None)
        if problem is None:
            return
        try:
            self(problem.answer, problem)
        except (Exception, SystemExit) as error:  # the same
            text = (
                str(error)
                if str(error).startswith(f"{self._path} returned")
                else f"{self._path} raised {_brief(error)}"
            )
            raise ValueError(f"{text}, on the reference answer of {_shown(problem.question)}") from error


class RewardedSource:
    """Implementation of envs.source.ProblemSource that grades another source's problems by an own function."""

    def __init__(self, source: ProblemSource, reward: OwnReward) -> None:
        self._source, self._reward = source, reward
        reward.try_out(self)

    def draw(self, number: int) -> SourceProblem:
        """Return problem `number`, with its question among the entries of `info`."""
        found = self._source.draw(number)
        more = found.entry if isinstance(found.entry, Mapping) else {}
        return SourceProblem(found.question, found.answer, {**more, "question": found.question})

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return the function's reward."""
        return self._reward(answer, problem)

    def parts(self, problem: SourceProblem, answer: str) -> dict[str, float]:
        """Return the function's further rewards."""
        return self._reward.parts(answer, problem)


class OwnEnvironment:
    """Implementation of envs.source.ProblemSource, and of a partner, by a class."""

    def __init__(self, path: str, its_class: object, options: Mapping[str, Any]) -> None:
        """Create the environment. Raises ValueError if the class lacks a method, or one of them cannot be used."""
        self._path = path
        if not inspect.isclass(its_class):
            raise ValueError(f"{path} is no class, but {_shown(its_class)}")
        try:
            own = its_class(**options)
        except (Exception, SystemExit) as error:  # the same
            raise ValueError(f"{path}({', '.join(options)}) raised {_brief(error)}") from error
        self._problem = _callable(f"{path}.problem", getattr(own, "problem", None), "number")
        self._reward = OwnReward(f"{path}.score", getattr(own, "score", None))
        reply = getattr(own, "reply", None)
        self._reply = None if reply is None else _callable(f"{path}.reply", reply, "completions, answer, info")
        self._reward.try_out(self)

    @property
    def partner(self) -> Partner | None:
        """Return the function that answers the model; None if the class has none."""
        return None if self._reply is None else self._answer

    def draw(self, number: int) -> SourceProblem:
        """Return problem `number`. Raises ValueError if the class does not make one."""
        try:
            found = self._problem(number)
        except (Exception, SystemExit) as error:  # the same
            raise ValueError(f"{self._path}.problem({number}) raised {_brief(error)}") from error
        if not isinstance(found, Mapping) or not all(isinstance(found.get(key), str) for key in ("question", "answer")):
            raise ValueError(
                f'{self._path}.problem({number}) returned {_shown(found)}; it must be a dict with texts "question" and "answer"'
            )
        return SourceProblem(found["question"], found["answer"], dict(found))

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return the reward of a completion."""
        return self._reward(answer, problem)

    def parts(self, problem: SourceProblem, answer: str) -> dict[str, float]:
        """Return the further rewards of a completion."""
        return self._reward.parts(answer, problem)

    def _answer(self, problem: SourceProblem, answers: Sequence[str], grade: Grade) -> str | None:
        assert self._reply is not None
        found = self._reply(list(answers), problem.answer, dict(problem.entry))
        if found is not None and not isinstance(found, str):
            raise ValueError(f"{self._path}.reply returned {_shown(found)}; a reply is a text, or None")
        return found


def _callable(path: str, function: object, arguments: str) -> Callable[..., Any]:
    """Return the function. Raises ValueError if it does not take these arguments."""
    if not callable(function):
        raise ValueError(f"{path} is missing" if function is None else f"{path} is not callable: {_shown(function)}")
    try:
        signature = inspect.signature(function)
        signature.bind(*arguments.split(", "))
    except ValueError:
        return function  # a builtin without a signature
    except TypeError as error:
        name = path.rpartition(":")[2]
        raise ValueError(
            f"{path} is defined as {name}{signature}, but called as {name}({arguments}): {error}"
        ) from None
    return function


def _finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end, even where a loop runs already."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:97]}..."
