"""Which steps a draw of `prime-node replay --sample` covers, by the dates of the manifests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest

from prime_node.cli.replay_target import first_young
from prime_node.replay.finding import Unfaithful


def reader(dates: Sequence[int]) -> Callable[[int], Awaitable[int]]:
    async def date_of(version: int) -> int:
        return dates[version]

    return date_of


async def test_the_draw_begins_at_the_first_policy_that_is_young_enough() -> None:
    for dates in ([5], [1, 2, 3, 3, 4, 9, 9, 12], [0, 0], list(range(1_000))):
        for oldest in (0, 3, 5, 12, 2_000):
            expected = next((version for version, date in enumerate(dates) if date >= oldest), len(dates))
            assert await first_young(reader(dates), len(dates) - 1, oldest) == expected


async def test_dates_that_fall_along_the_chain_are_a_finding() -> None:
    hidden = [100] * 20
    hidden[9] = 1  # where the bisection begins, so that it would leave out the steps before
    with pytest.raises(Unfaithful, match="manifest 9 is dated before manifest"):
        await first_young(reader(hidden), 19, 50)
    with pytest.raises(Unfaithful, match="dated before"):
        await first_young(reader([100, 100, 1]), 2, 50)
