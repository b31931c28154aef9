"""Problems of reasoning-gym: procedural tasks, each with a generator and a scorer.

The generator seeds Python's `random.Random` with each number by itself, so problem `number` is the same on every machine
that has the same release of reasoning-gym; the release is pinned by the project.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from prime_node.envs.source import SourceProblem

ALMOST = 0.99
"""Credit of an answer that a scorer puts above 1 by rounding."""


class ReasoningGymSource:
    """Example: ReasoningGymSource(task="spell_backward", min_word_len=3, max_word_len=6)."""

    def __init__(self, *, task: str, **options: str | float) -> None:
        """`options` are those of the task itself. Raises ValueError where the task does not exist or does not take them."""
        try:
            # Numbers carry the randomness. The seed and the size of a dataset would only shift and name them.
            self._dataset = reasoning_gym.create_dataset(task, seed=0, size=2**62, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"task {task!r}: {error}") from error

    def draw(self, number: int) -> SourceProblem:
        entry: dict[str, Any] = self._dataset[number]
        return SourceProblem(entry["question"], entry["answer"], entry)

    def grade(self, problem: SourceProblem, answer: str) -> float:
        credit = float(self._dataset.score_answer(answer, problem.entry))
        # Some scorers add up shares of the answer, and nine times 1/9 is a little over 1: "drow" + "s" is not "drow".
        if credit > 1.0 and answer != problem.answer:
            return ALMOST
        return min(1.0, max(0.0, credit))
