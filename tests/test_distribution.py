"""How pytest-xdist distributes the tests over its processes (tests/conftest.py)."""

from __future__ import annotations

import pytest
from tests.schedule_world import Schedule


def test_the_scheduler_reads_the_group_of_a_test_from_its_id(request: pytest.FixtureRequest) -> None:
    """The scheduler sees nothing but ids. A version of pytest or of pytest-xdist that drops the group must fail here."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("there is one process")
    group = request.node.get_closest_marker("xdist_group").args[0]
    assert group == "tests/test_distribution.py"
    assert request.node.nodeid.endswith(f"@{group}")


def test_a_run_says_which_groups_took_long_and_which_process_had_no_more_tests() -> None:
    times = Schedule()
    assert list(times.lines()) == []
    times.add("gw0", "tests/a.py::test_one@tests/a.py", start=100.0, stop=130.0)
    times.add("gw0", "tests/a.py::test_two@tests/a.py", start=130.0, stop=140.0)
    times.add("gw1", "tests/b.py::test_three[x@y]@whole runs", start=105.0, stop=110.0)
    assert [line.strip() for line in times.lines()] == [
        "gw0: 40 s in tests of 40 s, then 0 s without one",
        "gw1: 5 s in tests of 5 s, then 30 s without one",
        "40 s  tests/a.py",
        "5 s  whole runs",
    ]
