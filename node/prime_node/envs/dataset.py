"""A ProblemSource over a file of questions and answers: JSON lines here, other formats by an adapter that reads rows.

Every machine that reads it must have the same bytes, so the RunSpec names their digest. Only the trusted side reads it:
workers get their prompts in the lease.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from prime_node.envs.source import SourceProblem
from prime_protocol.digest import digest_of

Row = tuple[str, Mapping[str, Any]]
"""Row's position, for messages, and its fields."""


def is_same_text(answer: str, reference: str) -> bool:
    """Return whether two texts are equal except for white space and case."""
    return answer.split() == reference.split() or answer.casefold().split() == reference.casefold().split()


def is_same_number(answer: str, reference: str) -> bool:
    """Return whether the last numbers of answer and reference are equal. "So 1,250.00 dollars" matches "1250"."""
    number, wanted = _last_number(answer), _last_number(reference)
    return number is not None and number == wanted


COMPARISONS: dict[str, Callable[[str, str], bool]] = {"text": is_same_text, "number": is_same_number}


def comparison(
    name: str, comparisons: Mapping[str, Callable[[str, str], bool]] = COMPARISONS
) -> Callable[[str, str], bool]:
    """Return the comparison of this name. Raises ValueError with the known names."""
    if name not in comparisons:
        raise ValueError(f"compare must be one of {', '.join(comparisons)}, got {name!r}")
    return comparisons[name]


def rows_of_json_lines(data: bytes) -> Iterator[Row]:
    """Iterate over the rows: one JSON object a line. Raises ValueError."""
    for number, line in enumerate(data.decode("utf-8").splitlines(), start=1):
        if line.strip():
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"line {number}: needs a JSON object: {error}") from None
            if not isinstance(fields, dict):
                raise ValueError(f"line {number}: needs a JSON object, got a {type(fields).__name__}")
            yield f"line {number}", fields


class DatasetSource:
    """Problems of a dataset file.

    Example line: {"question": "What is 2 + 2?", "answer": "4"}. The options name other fields.
    """

    def __init__(
        self,
        read: Callable[[bytes], Iterator[Row]],
        comparisons: Mapping[str, Callable[[str, str], bool]],
        keep_rows: bool = False,
        *,
        path: str,
        digest: str,
        compare: str = "text",
        question_field: str = "question",
        answer_field: str = "answer",
        answer_after: str = "",
    ) -> None:
        """Read the dataset.

        `path` names a local file. `answer_after` cuts a worked answer to the text after its last occurrence, as "####"
        does in GSM8K. `keep_rows` keeps each row's fields as the problem's entry. Raises ValueError and OSError.
        """
        data = Path(path).read_bytes()
        if digest_of(data) != digest:
            raise ValueError(f"{path} has digest {digest_of(data)}, the run wants {digest}")
        self._is_same = comparison(compare, comparisons)
        self._problems: list[SourceProblem] = []
        try:
            for where, fields in read(data):
                missing = [name for name in (question_field, answer_field) if fields.get(name) is None]
                if missing:
                    raise ValueError(f"{where}: no field {missing[0]!r} among {', '.join(map(str, fields))}")
                answer = str(fields[answer_field])
                answer = answer.rpartition(answer_after)[2] if answer_after else answer
                entry = fields if keep_rows else None
                self._problems.append(SourceProblem(str(fields[question_field]), answer.strip(), entry))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if not self._problems:
            raise ValueError(f"{path} holds no problems")

    def draw(self, number: int) -> SourceProblem:
        """Return problem `number`, modulo the number of rows."""
        return self._problems[number % len(self._problems)]

    def grade(self, problem: SourceProblem, answer: str) -> float:
        """Return 1 if the comparison accepts the answer, else 0."""
        return float(self._is_same(answer, problem.answer))


def _last_number(text: str) -> Decimal | None:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", text)
    try:
        return Decimal(numbers[-1].replace(",", "")) if numbers else None
    except InvalidOperation:
        return None
