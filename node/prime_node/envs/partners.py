"""Partners: they answer the model between two turns of a rollout. Pure.

    calculator   an answer "calc 12 + 7" gets "19"; any other answer is the last one
    retry        a wrong answer gets "No. Try again."; a right one is the last

The last answer of a rollout is scored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from prime_node.envs.source import SourceProblem

Grade = Callable[[SourceProblem, str], float]
"""Function that returns the credit of a completion's text, in [0, 1]."""
Partner = Callable[[SourceProblem, Sequence[str], Grade], str | None]
"""Function that returns the reply to the answers so far; None if the rollout is over."""

EXPRESSION_CHARS_MAX = 200
_CALL = re.compile(r"calc\s+(?P<expression>\S.*)", re.DOTALL)
_TOKEN = re.compile(r"\s*(?:(\d{1,30})|([-+*()]))")
DEPTH_MAX = 20


def calculator(problem: SourceProblem, answers: Sequence[str], grade: Grade) -> str | None:
    """Reply to a call with its value (whole numbers, + - * and parentheses); None if the answer is no call."""
    call = _CALL.fullmatch(answers[-1].strip())
    if call is None:
        return None
    try:
        return str(calculate(call["expression"]))
    except ValueError as error:
        return f"error: {error}"


def retry(problem: SourceProblem, answers: Sequence[str], grade: Grade) -> str | None:
    """Ask for another try after a wrong answer; None after a right one."""
    return None if grade(problem, answers[-1]) == 1.0 else "No. Try again."


PARTNERS: dict[str, Partner] = {"calculator": calculator, "retry": retry}


def calculate(expression: str) -> int:
    """Return the value of an expression. Raises ValueError.

    Example: calculate("2 * (3 + 4)") == 14.
    """
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise ValueError("too long")
    tokens, place = [], 0
    while place < len(expression.rstrip()):
        found = _TOKEN.match(expression, place)
        if found is None:
            raise ValueError(f"what is {expression[place : place + 10]!r}?")
        tokens.append(found[1] or found[2])
        place = found.end()
    value, rest = _sum(tokens, 0)
    if rest:
        raise ValueError(f"what is {rest[0]!r} for?")
    return value


def _sum(tokens: list[str], depth: int) -> tuple[int, list[str]]:
    value, tokens = _product(tokens, depth)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens[0] == "+" else -1
        more, tokens = _product(tokens[1:], depth)
        value += sign * more
    return value, tokens


def _product(tokens: list[str], depth: int) -> tuple[int, list[str]]:
    value, tokens = _atom(tokens, depth)
    while tokens and tokens[0] == "*":
        more, tokens = _atom(tokens[1:], depth)
        value *= more
    return value, tokens


def _atom(tokens: list[str], depth: int) -> tuple[int, list[str]]:
    if not tokens or depth > DEPTH_MAX:
        raise ValueError("a number is missing" if not tokens else "too deep")
    if tokens[0] == "-":
        value, rest = _atom(tokens[1:], depth + 1)
        return -value, rest
    if tokens[0] == "(":
        value, rest = _sum(tokens[1:], depth + 1)
        if not rest or rest[0] != ")":
            raise ValueError("a parenthesis is missing")
        return value, rest[1:]
    if not tokens[0].isdigit():
        raise ValueError(f"what is {tokens[0]!r} for?")
    return int(tokens[0]), tokens[1:]
