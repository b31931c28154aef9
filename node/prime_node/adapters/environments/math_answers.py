"""Whether two mathematical answers are the same: "1/2", "0.5" and "\\frac{1}{2}" are.

math-verify parses both into sympy and compares them. A parse that takes longer than its own limit counts as wrong; so that nobody
can make every validator wait, an answer's length is bounded first.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

ANSWER_CHARS_MAX = 256
"""Of the end of a completion: the answer is what comes last."""
SECONDS_MAX = 1
"""For one parse or one comparison. math-verify counts by a signal, so it works in a process's main thread alone."""

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it logs a traceback for every answer that it cannot read


def is_same_math(answer: str, reference: str) -> bool:
    """Parses the last expression of each; a LaTeX one may stand bare or in $...$ or \\boxed{...}."""
    wanted = parse(f"${reference}$", parsing_timeout=SECONDS_MAX) or parse(reference, parsing_timeout=SECONDS_MAX)
    found = parse(answer[-ANSWER_CHARS_MAX:], parsing_timeout=SECONDS_MAX)
    return bool(wanted and found) and verify(wanted, found, timeout_seconds=SECONDS_MAX)
