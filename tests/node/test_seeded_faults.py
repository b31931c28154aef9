"""Many seeds of a simulated run with crashes, partitions, slow disks, wrong clocks, rot, a change of leader, and gateways."""

from __future__ import annotations

import pytest
from tests.node.seeded_faults_world import NOISE, shrink
from tests.node.seeded_world import RUNS, simulate

SEEDS, TOGETHER = 160, 10
"""All seeds, and those of one test: a second of processor, so that a busy machine does not reach the limit of a minute."""
HEAD_BEFORE_ITS_LINES = 37
"""A seed that crashes the coordinator often."""
PAIR = 54
"""A seed in which a standby takes over after a snapshot that it had not read."""
CHANGED_LENGTH = 79
"""A seed with gateways in which the length of a frame was changed, and waited for without end."""


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER))
def test_no_fault_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + TOGETHER):
        RUNS.run_or_shrink(seed)


@pytest.mark.parametrize("seed", [HEAD_BEFORE_ITS_LINES, PAIR, CHANGED_LENGTH])
def test_a_seed_gives_the_same_run_each_time(seed: int) -> None:
    first, second = simulate(seed), simulate(seed)
    assert first.faults == second.faults
    assert first.faults[0] == NOISE
    assert len(first.promised) == len(second.promised) > 3
    assert first.trained == second.trained
    assert [head.num_entries for head in first.heads] == [head.num_entries for head in second.heads]


def test_of_a_failing_list_the_fewest_remain() -> None:
    tried = []

    def fails(numbers: object) -> bool:
        tried.append(numbers)
        return {2, 9} <= set(numbers)  # type: ignore[call-overload]

    assert shrink(range(14), fails) == [2, 9]
    assert len(tried) < 14 * 3
    assert shrink(range(14), lambda numbers: True) == []
