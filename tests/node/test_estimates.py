"""pass@k and confidence intervals compared with their definitions."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from prime_node.algo.estimates import interval_95, pass_at_k


@pytest.mark.parametrize("num_right", range(6))
@pytest.mark.parametrize("k", [1, 2, 5])
def test_pass_at_k_is_the_share_of_all_choices_that_hold_a_right_one(num_right: int, k: int) -> None:
    choices = list(combinations([True] * num_right + [False] * (5 - num_right), k))
    assert pass_at_k(num_right, 5, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_of_fewer_completions_is_an_error(k: int) -> None:
    with pytest.raises(ValueError, match="needs at least"):
        pass_at_k(1, 4, k)


def test_an_interval_of_plain_coin_flips_is_wilsons() -> None:
    low, high = interval_95([1.0] * 8 + [0.0] * 2)
    assert (low, high) == pytest.approx((0.490, 0.943), abs=0.03)
    assert interval_95([1.0] * 10) == pytest.approx((0.722, 1.0), abs=1e-3)
    assert interval_95([0.0]) == pytest.approx((0.0, 0.793), abs=1e-3)


def test_steady_problems_make_an_interval_narrower_than_coin_flips_do() -> None:
    flips, steady = interval_95([1.0, 0.0] * 20), interval_95([0.6, 0.4] * 20)
    assert steady[1] - steady[0] < (flips[1] - flips[0]) / 3


def test_an_interval_covers_the_true_value_about_as_often_as_it_states() -> None:
    rng, hits, rounds = random.Random(0), 0, 800
    for _ in range(rounds):
        chances = [rng.choice([0.1, 0.5, 0.9]) for _ in range(40)]  # problems differ: their mean is 0.5
        low, high = interval_95([sum(rng.random() < chance for _ in range(4)) / 4 for chance in chances])
        hits += low <= 0.5 <= high
    assert 0.92 < hits / rounds < 0.98


def test_an_interval_of_values_beyond_one_or_below_nought_is_the_normal_one() -> None:
    low, high = interval_95([2.0, 2.0, 0.5, -1.0] * 16)
    assert (low + high) / 2 == pytest.approx(0.875)
    assert high - low == pytest.approx(0.614, abs=1e-3)
    assert interval_95([2.0] * 3) == (2.0, 2.0)
