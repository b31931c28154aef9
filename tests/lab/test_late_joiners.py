"""How the work is shared with workers that join later than others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prime_lab.scenario import Costs, Scenario
from prime_lab.world import SimulatedRun
from prime_protocol.schedule import Schedule

WORKERS, STEPS, GROUPS_PER_LEASE, JOINING_S = 40, 5, 2, 5.0


def shares(group_seconds: float) -> list[int]:
    """Return the rollouts accepted from each worker; each step has one lease for each."""
    run = SimulatedRun(
        Scenario(
            Schedule(),
            async_level=1,
            groups_per_step=WORKERS * GROUPS_PER_LEASE,
            num_steps=STEPS,
            num_workers=WORKERS,
            group_seconds=lambda slot: group_seconds,
            train_seconds=lambda step, slots: 1.0,
            costs=Costs(upload=0.01, check=0.01, validators=16),
            groups_per_lease=GROUPS_PER_LEASE,
            leases_ahead=0,
            first_lease_seconds=lambda number: JOINING_S * number / WORKERS,
        )
    )
    run.run()
    return [worker.accepted for worker in run.state.workers.values()]


def fairness(accepted: Sequence[int]) -> float:
    """Return Jain's index."""
    return sum(accepted) ** 2 / (len(accepted) * sum(each**2 for each in accepted))


@pytest.mark.parametrize("group_seconds", [2 * JOINING_S, 20 * JOINING_S])
def test_where_a_lease_takes_longer_than_joining_those_that_join_last_get_their_share(group_seconds: float) -> None:
    assert fairness(shares(group_seconds)) > 0.95


def test_where_a_lease_takes_no_time_the_first_ones_do_the_first_steps_alone_as_nothing_waits_for_others() -> None:
    accepted = shares(0.01)
    assert fairness(accepted) < 0.9
    assert sum(accepted[: WORKERS // 4]) > sum(accepted[-WORKERS // 4 :])
