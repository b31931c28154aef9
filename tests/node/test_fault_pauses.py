"""A role whose engine fails begins again, later after each further fault."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.time_world import VirtualClock

from prime_node.cli.lifetime import FAULTS, counted_faults, pause_after_faults
from prime_node.ports.engine import EngineFault
from prime_protocol.errors import LocalError


class CountedClock(VirtualClock):
    """Clock that remembers the sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await super().sleep(seconds)


def fail(folder: Path, clock: CountedClock, error: Exception) -> None:
    with pytest.raises(type(error)), counted_faults(folder, clock):
        raise error


async def test_a_role_waits_twice_as_long_after_each_further_fault_and_an_hour_at_most(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = CountedClock()
    for number in range(9):
        await pause_after_faults(tmp_path, clock)
        fail(tmp_path, clock, ExceptionGroup("tasks", [EngineFault(f"fault {number}")]))
    assert clock.slept_s == [60, 120, 240, 480, 960, 1920, 3600, 3600]
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 8
    assert f"remove {tmp_path / FAULTS}" in caplog.messages[0]


async def test_a_fault_that_is_long_ago_is_forgotten_and_one_in_the_future_delays_no_longer(tmp_path: Path) -> None:
    clock = CountedClock()
    for _ in range(3):
        fail(tmp_path, clock, EngineFault("wrong"))
    clock.seconds -= 86_400.0
    await pause_after_faults(tmp_path, clock)
    assert clock.slept_s == [240], "a clock that was wrong"
    clock.seconds += 2 * 86_400.0
    await pause_after_faults(tmp_path, clock)
    fail(tmp_path, clock, EngineFault("wrong"))
    await pause_after_faults(tmp_path, clock)
    assert clock.slept_s == [240, 60]


async def test_a_fault_after_hours_of_work_counts_as_the_first(tmp_path: Path) -> None:
    """Before, faults that were five hours apart ended at pauses of an hour."""
    clock = CountedClock()
    for _ in range(4):
        fail(tmp_path, clock, EngineFault("wrong"))
        await pause_after_faults(tmp_path, clock)
        clock.seconds += 5 * 3_600.0
    assert clock.slept_s == [60] * 4


async def test_other_faults_and_a_damaged_file_delay_nothing(tmp_path: Path) -> None:
    clock = CountedClock()
    fail(tmp_path, clock, LocalError("a setting"))
    assert not (tmp_path / FAULTS).exists()
    for damaged in ("", "[]", '{"count": "x", "at_ms": 1}', '{"count": 1}'):
        (tmp_path / FAULTS).write_text(damaged)
        await pause_after_faults(tmp_path, clock)
    assert clock.slept_s == []
