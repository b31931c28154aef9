"""Problems of reasoning-gym: procedural tasks, each with a generator and a scorer.

The generator seeds Python's `random.Random` with each number alone, so problem `number` is the same on every machine with the
same release of reasoning-gym; the project pins the release.
"""

from __future__ import annotations

import sys
from importlib.metadata import requires
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from prime_node.envs.dataset import comparison
from prime_node.envs.source import SourceProblem

NEEDS = {"codeio": "zss", "game_of_life": "cellpylib", "game_of_life_halting": "cellpylib", "zebra_puzzles": "pycosat"}
"""Packages that come as source alone, by the tasks that use them. The installer leaves them out: it compiles nothing."""
MISSING = {name for name in NEEDS.values() if find_spec(name) is None}


def _imported() -> Any:
    sys.modules.update({name: ModuleType(name) for name in MISSING})  # reasoning_gym imports all of them at once
    import reasoning_gym

    for name in MISSING:
        del sys.modules[name]
    return reasoning_gym


GYM = _imported()
ALMOST = 0.99
"""Credit of an answer that a scorer rates above 1 because of rounding."""
RUNS_ANSWERS = frozenset(
    {
        *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
        *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
    }
)
"""Tasks whose scorers evaluate the answer as Python: by eval, or by sympy's parse_expr, which calls eval. A test compares this
set with the scorers of the installed release."""


class ReasoningGymSource:
    """Source of one task's problems. Example: ReasoningGymSource(task="spell_backward", min_word_len=3, max_word_len=6)."""

    def __init__(
        self,
        allow_code: bool = False,
        /,
        *,
        task: str,
        compare: str = "",
        question_field: str = "",
        **options: str | float,
    ) -> None:
        """Create the task with its own `options`.

        `compare` replaces the task's scorer by a comparison with its answer. `question_field` replaces its question by an entry
        of its metadata, such as the `expression` of chain_sum, without the task's own wording. `allow_code` permits a scorer
        that runs answers as code. Raises ValueError if the task or the comparison does not exist, the task rejects its options,
        its first problem has no such field, its scorer runs answers without permission, or a package that it needs is missing.
        """
        if (package := NEEDS.get(task)) in MISSING:
            pin = next(line for line in requires("reasoning-gym") or () if line.startswith(package))
            install = f"python3 -m pip --python {sys.executable} install '{pin}'"
            raise ValueError(f"task {task!r} needs the package {package}, which comes as source alone: `{install}`")
        if task in RUNS_ANSWERS and not compare and not allow_code:
            raise ValueError(
                f"the scorer of task {task!r} runs answers as Python code, and strangers write the answers: set "
                'options.compare = "text", or permit it on this machine by environments.unsafe_answers_as_code'
            )
        self._is_same = comparison(compare) if compare else None
        self._question_field = question_field
        try:
            # The numbers provide the randomness: the seed and the size of a dataset would only shift and name them.
            self._dataset = GYM.create_dataset(task, seed=0, size=2**62, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"task {task!r}: {error}") from error
        metadata = self._dataset[0]["metadata"] if question_field else {}
        if question_field and question_field not in metadata:
            raise ValueError(f"task {task!r} has no field {question_field!r} among {', '.join(metadata)}")

    def draw(self, number: int) -> SourceProblem:
        """Return problem `number`."""
        entry: dict[str, Any] = self._dataset[number]
        question = str(entry["metadata"][self._question_field]) if self._question_field else entry["question"]
        return SourceProblem(question, entry["answer"], entry)

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return the credit for an answer, in [0, 1]: the scorer's, or 1 if the comparison accepts it, else 0."""
        if self._is_same is not None:
            return float(self._is_same(answer, problem.answer))
        credit = float(self._dataset.score_answer(answer, problem.entry))
        # Some scorers sum shares of the answer, and nine times 1/9 is slightly above 1: "drow" + "s" is not "drow".
        if credit > 1.0 and answer != problem.answer:
            return ALMOST
        return min(1.0, max(0.0, credit))
