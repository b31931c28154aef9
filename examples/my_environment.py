"""An environment of one's own, in three methods. examples/own_environment.toml names it: environment = "my_environment:Guess"."""

from __future__ import annotations

import random
from typing import Any


class Guess:
    """The model guesses a number. After each wrong guess it is told whether the number is larger or smaller."""

    def __init__(self, largest: int = 99) -> None:
        self._largest = largest

    def problem(self, number: int) -> dict[str, Any]:
        """Return problem `number`: the same on every machine, so it depends on nothing but its arguments."""
        draw = random.Random(number)
        wanted = draw.randint(0, self._largest)
        return {"question": f"Guess {draw.randint(0, 999_999)}: 0 to {self._largest}", "answer": str(wanted)}

    def score(self, completion: str, answer: str, info: dict[str, Any]) -> float:
        """Return the reward of the last answer: 1 counts as right."""
        return 1.0 if completion.strip() == answer else 0.0

    def reply(self, completions: list[str], answer: str, info: dict[str, Any]) -> str | None:
        """Return what the model reads next; None ends the rollout. An environment of one turn has no such method."""
        guess = completions[-1].strip()
        if guess == answer:
            return None
        if not guess.isdecimal():
            return "A number, please."
        return "Larger." if int(guess) < int(answer) else "Smaller."
