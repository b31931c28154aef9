"""The soak excuses `verify` only while the coordinator's timestamps may be ahead, and only for that."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "scripts" / "bench" / "soak_checks.py"
AHEAD = "expired: the timestamp is 301 s ahead of this machine's clock; set the clock"


@pytest.fixture(scope="module")
def checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_soak_checks", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def output(last: int, detail: str, failed: int = 0) -> str:
    made: list[dict[str, Any]] = [
        {"number": number, "passed": number != failed, "detail": ""} for number in range(1, last)
    ]
    return json.dumps({"ok": False, "checks": [*made, {"number": last, "passed": False, "detail": detail}]})


def test_a_timestamp_that_is_ahead_is_distinguished_from_everything_else(checks: ModuleType) -> None:
    assert checks.is_only_ahead(output(9, AHEAD))
    others = [output(9, "freeze: the source's head is policy 3"), output(8, AHEAD), output(9, AHEAD, failed=4)]
    assert not any(checks.is_only_ahead(one) for one in [*others, "", "{}", '{"checks": []}'])


@pytest.mark.parametrize(
    ("leaps", "until_s"),
    [
        ([(1_000.0, 100.0)], 1_000.0),
        ([(1_000.0, -3_000.0)], 1_000.0),
        ([(1_000.0, 845.0)], 1_725.0),
        ([(1_000.0, 846.0)], 1_000.0),  # its clock is followed at once
        ([(1_000.0, 500.0), (1_010.0, 3_000.0)], 1_380.0),
        ([(1_000.0, 900.0), (1_100.0, 70.0)], 1_780.0),  # the second is dated after the first
    ],
)
def test_until_when_timestamps_may_be_ahead(
    checks: ModuleType, leaps: list[tuple[float, float]], until_s: float
) -> None:
    dates = checks.WrongDates(600.0)
    for now_s, ahead_s in leaps:
        dates.add(now_s, ahead_s, 5.0)
    assert max(dates.until_s, leaps[-1][0]) == until_s
