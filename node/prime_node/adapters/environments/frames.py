"""Lines of JSON from an environment process.

Its code is untrusted: each line is checked before it is used. {"id", "result"} and {"id", "error"} answer a request, with
"worn" if the process should be replaced, and "silent" if a grading took too long. {"ask", "id", "prompt"} asks for a
completion in episode `id`. A process that writes anything else is ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prime_protocol import limits
from prime_protocol.visible import printable

TOKEN_ID_MAX = 2**31 - 1
PARTS_MAX = 16
"""Further rewards of one completion."""
PART_NAME_CHARS_MAX = 64


@dataclass(frozen=True, slots=True)
class Asked:
    """An episode's request to the model."""

    number: int
    """Number of the request; the answer names it."""
    episode: int
    prompt: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """Answer to a request of the host."""

    number: int
    result: Any
    """Unchecked result: its type depends on the request."""
    error: str | None
    """Error of the environment, if it failed."""
    is_worn: bool
    is_silent: bool = False
    """Whether a grading took too long."""


def read_message_frame(line: bytes) -> Asked | Answered:
    """Parse one line. Raises ValueError."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(found, dict) or not _is_count(found.get("id")):
        raise ValueError("not an object with an id")
    if "ask" in found:
        prompt = found.get("prompt")
        if not _is_count(found["ask"]) or not isinstance(prompt, list) or len(prompt) > limits.TOKENS_MAX:
            raise ValueError("not a request with a prompt")
        if not all(type(token) is int and 0 <= token <= TOKEN_ID_MAX for token in prompt):
            raise ValueError("the prompt contains something other than token ids")
        return Asked(found["ask"], found["id"], tuple(prompt))
    if ("error" in found) == ("result" in found):
        raise ValueError("neither a result nor an error")
    error = printable(str(found["error"]), limits.TEXT_CHARS_MAX) if "error" in found else None
    return Answered(found["id"], found.get("result"), error, "worn" in found, "silent" in found)


def as_text(found: object) -> str:
    """Check that it is a text. Raises ValueError."""
    if not isinstance(found, str):
        raise ValueError(f"it returned a {type(found).__name__}, not a text")
    if len(found) > limits.ENVIRONMENT_TEXT_CHARS_MAX:
        raise ValueError(
            f"it returned a text of {len(found)} characters; {limits.ENVIRONMENT_TEXT_CHARS_MAX} are allowed"
        )
    try:
        found.encode()
    except UnicodeEncodeError:
        raise ValueError("it returned a text with an incomplete character (a lone surrogate)") from None
    return found


def as_texts(found: object, count: int) -> Sequence[str]:
    """Check that they are at most `count` texts. Raises ValueError."""
    if not isinstance(found, list) or len(found) > count:
        raise ValueError(f"it did not give a list of at most {count} texts")
    return [as_text(each) for each in found]


def as_reward(found: object) -> float:
    """Check that it is a bounded number. Raises ValueError."""
    if isinstance(found, bool | int | float) and abs(found) <= limits.REWARD_MAX:  # false for NaN
        return float(found)
    # Only a short value is shown: a nested one may be too deep for `repr`.
    shown = repr(found) if isinstance(found, int | float) else f"a {type(found).__name__}"
    raise ValueError(f"it returned {printable(shown, 40)}, not a number of at most {limits.REWARD_MAX:g} as a reward")


def as_parts(found: object) -> Mapping[str, float]:
    """Check that they are a few named numbers. Raises ValueError."""
    if not isinstance(found, dict) or len(found) > PARTS_MAX:
        raise ValueError(f"it did not give at most {PARTS_MAX} named rewards")
    if not all(isinstance(name, str) and len(name) <= PART_NAME_CHARS_MAX for name in found):
        raise ValueError(
            f"it named a reward with something other than a text of at most {PART_NAME_CHARS_MAX} characters"
        )
    return {name: as_reward(value) for name, value in found.items()}


def as_flag(found: object) -> bool:
    """Check that it is a boolean. Raises ValueError."""
    if not isinstance(found, bool):
        raise ValueError(f"it returned a {type(found).__name__}, not true or false")
    return found


def _is_count(found: object) -> bool:
    return type(found) is int and 0 <= found <= limits.COUNT_MAX
