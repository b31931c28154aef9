"""A ProblemSource over a file of questions and answers, one JSON object a line.

Every machine that reads it must have the same bytes, so the RunSpec names their digest. Only the trusted side reads it:
workers get their prompts in the lease.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from pathlib import Path

from prime_node.envs.source import SourceProblem
from prime_protocol.digest import digest_of


def is_same_text(answer: str, reference: str) -> bool:
    """Equal but for white space and case."""
    return answer.split() == reference.split() or answer.casefold().split() == reference.casefold().split()


def is_same_number(answer: str, reference: str) -> bool:
    """The last number of the answer equals the last number of the reference. "So 1,250.00 dollars" is "1250"."""
    number, wanted = _last_number(answer), _last_number(reference)
    return number is not None and number == wanted


COMPARISONS: dict[str, Callable[[str, str], bool]] = {"text": is_same_text, "number": is_same_number}


class JsonlSource:
    """Example line: {"question": "What is 2 + 2?", "answer": "4"}. Fields of other names are named in the options."""

    def __init__(
        self,
        *,
        path: str,
        digest: str,
        compare: str = "text",
        question_field: str = "question",
        answer_field: str = "answer",
        answer_after: str = "",
    ) -> None:
        """`answer_after` cuts a worked answer down to what follows its last occurrence, as "####" does in GSM8K."""
        data = Path(path).expanduser().read_bytes()
        if digest_of(data) != digest:
            raise ValueError(f"{path} has digest {digest_of(data)}, the run wants {digest}")
        if compare not in COMPARISONS:
            raise ValueError(f"compare is one of {', '.join(COMPARISONS)}, got {compare!r}")
        self._is_same = COMPARISONS[compare]
        self._problems = [
            _problem(line, question_field, answer_field, answer_after, where=f"{path}:{number}")
            for number, line in enumerate(data.decode("utf-8").splitlines(), start=1)
            if line.strip()
        ]
        if not self._problems:
            raise ValueError(f"{path} holds no problems")

    def draw(self, number: int) -> SourceProblem:
        return self._problems[number % len(self._problems)]

    def grade(self, problem: SourceProblem, answer: str) -> float:
        return float(self._is_same(answer, problem.answer))


def _problem(line: str, question_field: str, answer_field: str, answer_after: str, *, where: str) -> SourceProblem:
    try:
        fields = json.loads(line)
        question, answer = str(fields[question_field]), str(fields[answer_field])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: needs a JSON object with {question_field!r} and {answer_field!r}: {error}"
        ) from None
    if answer_after:
        answer = answer.rpartition(answer_after)[2]
    return SourceProblem(question, answer.strip())


def _last_number(text: str) -> Decimal | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None
