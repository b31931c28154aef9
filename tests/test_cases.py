"""A failure among many cases in one test is as visible as that of a test."""

from __future__ import annotations

import pytest
from tests.cases_world import SHOWN_MAX, check_each


def test_every_case_that_fails_is_named_and_the_others_are_checked() -> None:
    seen: list[int] = []

    def check(number: int) -> None:
        seen.append(number)
        assert number != 2
        if number == 4:
            with pytest.raises(KeyError):
                pass

    with pytest.raises(BaseExceptionGroup, match="2 of 5 cases fail: two, four") as raised:
        check_each(zip(("one", "two", "three", "four", "five"), range(1, 6), strict=True), check)
    assert seen == [1, 2, 3, 4, 5]
    assert [error.__notes__ for error in raised.value.exceptions] == [["case two"], ["case four"]]


def test_no_cases_are_a_failure_and_many_failures_are_all_named() -> None:
    with pytest.raises(AssertionError, match="there are no cases"):
        check_each([], print)
    with pytest.raises(BaseExceptionGroup, match=r"99 of 99 cases fail: 0, .*, 98") as raised:
        check_each(((str(number), number) for number in range(99)), lambda number: number // 0)
    assert len(raised.value.exceptions) == SHOWN_MAX
