"""Problems of reasoning-gym: procedural tasks, each with a generator and a scorer.

The generator seeds Python's `random.Random` with each number alone, so problem `number` is the same on every machine with the
same release of reasoning-gym; the project pins the release.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from prime_node.envs.source import SourceProblem

ALMOST = 0.99
"""Credit of an answer that a scorer rates above 1 because of rounding."""


class ReasoningGymSource:
    """Source of one task's problems. Example: ReasoningGymSource(task="spell_backward", min_word_len=3, max_word_len=6)."""

    def __init__(self, *, task: str, **options: str | float) -> None:
        """Create the task with its own `options`. Raises ValueError if the task does not exist or rejects them."""
        try:
            # The numbers provide the randomness: the seed and the size of a dataset would only shift and name them.
            self._dataset = reasoning_gym.create_dataset(task, seed=0, size=2**62, **options)
        except (TypeError, ValueError, AssertionError) as error:
            raise ValueError(f"task {task!r}: {error}") from error

    def draw(self, number: int) -> SourceProblem:
        """Return problem `number`."""
        entry: dict[str, Any] = self._dataset[number]
        return SourceProblem(entry["question"], entry["answer"], entry)

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return the scorer's credit for an answer, in [0, 1]."""
        credit = float(self._dataset.score_answer(answer, problem.entry))
        # Some scorers sum shares of the answer, and nine times 1/9 is slightly above 1: "drow" + "s" is not "drow".
        if credit > 1.0 and answer != problem.answer:
            return ALMOST
        return min(1.0, max(0.0, credit))
