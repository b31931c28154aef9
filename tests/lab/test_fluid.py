"""Transfers share links by max-min fairness, and lose no time between strides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prime_lab.fluid import Fluid, max_min_rates


def rates(pairs: list[tuple[int, int]], up: list[float], down: list[float]) -> list[float]:
    senders = np.array([sender for sender, _ in pairs], np.int32)
    receivers = np.array([receiver for _, receiver in pairs], np.int32)
    return max_min_rates(senders, receivers, np.array(up, np.float64), np.array(down, np.float64)).tolist()


def test_what_one_receiver_cannot_take_goes_to_the_others() -> None:
    assert rates([(0, 1), (0, 2)], [10, 0, 0], [0, 2, 100]) == pytest.approx([2, 8])


def test_two_senders_share_a_downlink() -> None:
    assert rates([(0, 2), (1, 2), (1, 3)], [10, 10, 0, 0], [0, 0, 6, 100]) == pytest.approx([3, 3, 7])


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=30),
    st.lists(st.floats(1, 100), min_size=6, max_size=6),
    st.lists(st.floats(1, 100), min_size=6, max_size=6),
)
def test_no_link_carries_more_than_it_can_and_every_transfer_meets_a_full_one(
    pairs: list[tuple[int, int]], up: list[float], down: list[float]
) -> None:
    found = rates(pairs, up, down)
    sent = [sum(rate for rate, (sender, _) in zip(found, pairs, strict=True) if sender == host) for host in range(6)]
    got = [sum(rate for rate, (_, taker) in zip(found, pairs, strict=True) if taker == host) for host in range(6)]
    assert all(used <= link * (1 + 1e-9) for used, link in zip(sent + got, up + down, strict=True))
    for sender, receiver in pairs:
        assert sent[sender] >= up[sender] * (1 - 1e-6) or got[receiver] >= down[receiver] * (1 - 1e-6)


def test_many_short_transfers_take_as_long_as_one_long_one() -> None:
    fluid = Fluid(np.array([100.0, 1.0]), np.array([1.0, 100.0]))
    left, stride = 50, 0
    for _ in range(5):
        fluid.open(0, 1, 10.0)
    while left:
        stride += 1
        for _ in fluid.advance(0.25):
            left -= 1
            if left >= 5:
                fluid.open(0, 1, 10.0)
    assert stride * 0.25 == pytest.approx(5.0, rel=0.11)
    assert fluid.sent[0] == pytest.approx(500.0)
    assert len(fluid) == 0


def test_a_transfer_that_is_cut_leaves_its_share_to_the_others() -> None:
    fluid = Fluid(np.array([10.0, 0.0, 0.0]), np.array([0.0, 100.0, 100.0]))
    gone, stays = fluid.open(0, 1, 50.0), fluid.open(0, 2, 50.0)
    assert fluid.advance(1.0) == []
    assert fluid.cut(gone) == pytest.approx(45.0)
    assert fluid.advance(4.5) == [(pytest.approx(4.5), stays)]


def test_room_for_transfers_grows() -> None:
    fluid = Fluid(np.ones(2), np.ones(2))
    assert len({fluid.open(0, 1, 1.0) for _ in range(5_000)}) == 5_000
    assert len(fluid.advance(5_001.0)) == 5_000
