"""Many quick cases in one test. pytest's own work for a test would take longer than such a case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")
SHOWN_MAX = 10
"""Failures with their tracebacks; the names of all that fail are in the message."""


def check_each(cases: Iterable[tuple[str, T]], check: Callable[[T], object]) -> None:
    """Check every named case, also after one has failed, and raise a group of the failures that names each."""
    count, failures = 0, dict[str, BaseException]()
    for name, case in cases:
        count += 1
        try:
            check(case)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 (they are raised again)
            error.add_note(f"case {name}")
            failures[name] = error
    assert count, "there are no cases"
    if failures:
        raise BaseExceptionGroup(
            f"{len(failures)} of {count} cases fail: {', '.join(failures)}", list(failures.values())[:SHOWN_MAX]
        )
