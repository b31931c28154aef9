"""The clock that jumps: order, bells, deadlines, and tasks that wait forever."""

from __future__ import annotations

import pytest

from prime_lab.virtual_time import Bell, Process, VirtualTime


def test_sleepers_continue_in_the_order_of_their_time_and_then_of_their_start() -> None:
    time = VirtualTime()
    seen: list[tuple[str, float]] = []

    def sleeper(name: str, seconds: float) -> Process:
        yield seconds
        seen.append((name, time.now_s))

    for name, seconds in (("late", 2.0), ("first", 1.0), ("second", 1.0)):
        time.start(sleeper(name, seconds))
    time.run(until=lambda: len(seen) == 3)
    assert seen == [("first", 1.0), ("second", 1.0), ("late", 2.0)]


def test_a_bell_wakes_all_waiting_tasks_and_a_deadline_the_others() -> None:
    time = VirtualTime()
    bell, silent = Bell(time), Bell(time)
    woken: list[tuple[str, float]] = []

    def waits(name: str, what: Bell, seconds: float | None) -> Process:
        yield what if seconds is None else what.within(seconds)
        woken.append((name, time.now_s))

    def rings() -> Process:
        yield 3.0
        bell.ring()
        yield 9.0

    for name, what, seconds in (("for ever", bell, None), ("in time", bell, 5.0), ("in vain", silent, 4.0)):
        time.start(waits(name, what, seconds))
    time.start(rings())
    time.run(until=lambda: time.now_s >= 12.0)
    assert woken == [("for ever", 3.0), ("in time", 3.0), ("in vain", 4.0)]


def test_a_run_in_which_all_tasks_wait_for_each_other_is_an_error() -> None:
    time = VirtualTime()

    def waits() -> Process:
        yield Bell(time)

    time.start(waits())
    with pytest.raises(RuntimeError, match="every task waits"):
        time.run(until=lambda: False)
