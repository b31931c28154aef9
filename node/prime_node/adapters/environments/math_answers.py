"""Equality of two mathematical answers: "1/2", "0.5" and "\\frac{1}{2}" are equal.

math-verify parses both into sympy and compares them. A parse beyond its time limit counts as wrong. The length of an answer is
bounded first, so that no answer can make every validator wait.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

ANSWER_CHARS_MAX = 256
"""Number of final characters of a completion that are parsed: the answer comes last."""
SECONDS_MAX = 1
"""Limit on one parse or comparison. math-verify's timer is a signal, so it works only in a process's main thread."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for every unreadable answer


def is_same_math(answer: str, reference: str) -> bool:
    """Compare the last expression of each; a LaTeX one may be bare or in $...$ or \\boxed{...}."""
    wanted = parse(f"${reference}$", parsing_timeout=SECONDS_MAX) or parse(reference, parsing_timeout=SECONDS_MAX)
    found = parse(answer[-ANSWER_CHARS_MAX:], parsing_timeout=SECONDS_MAX)
    return bool(wanted and found) and verify(wanted, found, timeout_seconds=SECONDS_MAX)
