"""How pytest-xdist distributes the tests over its processes (tests/conftest.py)."""

from __future__ import annotations

import pytest


def test_the_scheduler_reads_the_group_of_a_test_from_its_id(request: pytest.FixtureRequest) -> None:
    """The scheduler sees nothing but ids. A version of pytest or of pytest-xdist that drops the group must fail here."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("there is one process")
    group = request.node.get_closest_marker("xdist_group").args[0]
    assert group == "tests/test_distribution.py"
    assert request.node.nodeid.endswith(f"@{group}")
