"""A run of hundreds of steps: nothing that the coordinator holds in memory or on its disk grows without a stated bound."""

from __future__ import annotations

from collections import Counter

import pytest
from tests.node.seeded_long_world import SAMPLES, LongRun, run_long, sizes_of

from prime_node.coordinator.state.records import Publication


@pytest.mark.slow
def test_nothing_grows_with_the_steps_of_a_run() -> None:
    found = run_long(240)
    assert len(found.memory) == SAMPLES
    assert sum(found.memory[-1].values()) > 1_000, "the coordinator's parts were found"
    assert found.grown() == []


def test_what_grows_is_named() -> None:
    found = LongRun(8_000)
    for sample in range(SAMPLES):
        found.memory.append(Counter({".a.b": 100, ".a.grows": 100 * sample}))
        found.disk.append(Counter({"receipts": 2_500 * sample, "files": 100 * sample}))
    assert found.grown() == [".a.grows: 300 -> 700 elements", "files on the disk: 300 more in 3000 steps"]


def test_containers_are_found_by_the_attributes_that_lead_to_them() -> None:
    publication = Publication("f" * 64, ())
    assert sizes_of({1: publication, 2: publication}) == {"": 2, "[].routes": 0}
