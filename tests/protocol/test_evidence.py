"""Evidence: honest workers keep theirs low permanently, cheaters do not, and a late change is detected."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from prime_protocol.evidence import Moments, Sums, Wealth, calibrate_statistics, folded, log_evidence, sums_of, updated

WEALTH = TypeAdapter(Wealth)
LAMBDAS = (1.0, 5.0, 20.0, 50.0)
TOKENS = 64


def honest(rng: np.random.Generator, num_tokens: int) -> np.ndarray:
    """Return a statistic as engines produce it: mostly exact, sometimes a flip with a roughly exponential margin."""
    return np.where(rng.random(num_tokens) < 0.01, rng.exponential(0.03, num_tokens), 0.0)


def calibrated(num_tokens: int = 50_000) -> Moments:
    return calibrate_statistics(honest(np.random.default_rng(7), num_tokens), cap=0.5, lambdas=LAMBDAS)


def run(moments: Moments, bundles: list[np.ndarray]) -> list[float]:
    wealth, logs = Wealth(), []
    for values in bundles:
        wealth = updated(wealth, sums_of(values, moments))
        logs.append(log_evidence({"margin": wealth}))
    return logs


@pytest.mark.slow
def test_honest_workers_are_rarely_suspected_however_long_and_often_one_looks() -> None:
    """Ville at 1 / c = 0.05: at most 20 of 400 honest workers are expected to reach it. The bound has slack here."""
    moments, reached = calibrated(), 0
    for seed in range(400):
        rng = np.random.default_rng(seed)
        reached += max(run(moments, [honest(rng, TOKENS) for _ in range(150)])) >= math.log(20)
    assert reached <= 20


def test_with_exact_moments_the_mean_of_the_evidence_stays_at_most_one() -> None:
    """The defining property without slack: moments without a safety margin, one token per bundle, a heavy mixture."""
    share, rate = 0.1, 2.0
    exact = Moments(cap=1.0, lambdas=(rate,), log_moments=(math.log(1 - share + share * math.exp(rate)),), num_tokens=1)
    rng = np.random.default_rng(3)
    finals = [run(exact, [(rng.random(1) < share).astype(float) for _ in range(12)])[-1] for _ in range(3_000)]
    mean = float(np.exp(finals).mean())
    spread = float(np.exp(finals).std()) / math.sqrt(len(finals))
    assert mean <= 1 + 4 * spread
    assert mean >= 1 - 4 * spread - 0.05


def test_a_cheater_is_seen_within_a_few_bundles() -> None:
    rng = np.random.default_rng(1)
    cheating = [np.where(rng.random(TOKENS) < 0.2, rng.exponential(0.1, TOKENS), 0.0) for _ in range(10)]
    logs = run(calibrated(), cheating)
    assert logs[-1] > math.log(1e5)
    assert logs == sorted(logs)


def test_cheating_after_long_honest_work_is_seen_almost_as_soon() -> None:
    rng = np.random.default_rng(2)
    past = [honest(rng, TOKENS) for _ in range(500)]
    cheating = [np.where(rng.random(TOKENS) < 0.2, rng.exponential(0.1, TOKENS), 0.0) for _ in range(12)]
    logs = run(calibrated(), past + cheating)
    assert max(logs[:500]) < math.log(1e5) < logs[-1]


def test_several_statistics_cost_the_logarithm_of_their_number() -> None:
    rich = Wealth(num_bundles=3, log_wealth=(30.0, 30.0))
    alone = log_evidence({"margin": rich})
    beside = log_evidence({"margin": rich, "logprob": Wealth(), "proof": Wealth()})
    assert alone - beside == pytest.approx(math.log(3), abs=1e-6)
    assert log_evidence({}) == 0.0 == log_evidence({"margin": Wealth()})


def test_a_small_sample_allows_more_than_a_large_one() -> None:
    small, large = calibrated(500), calibrated(50_000)
    assert all(a > b for a, b in zip(small.log_moments, large.log_moments, strict=True))


def test_values_below_0_lower_moments_but_never_hide_the_errors() -> None:
    """A statistic that counts for honest workers too: log M0 is at least 0, and headroom enlarges what is above 0."""
    rng = np.random.default_rng(8)
    small, large = (np.where(rng.random(20_000) < 0.1, rng.normal(-0.05, scale, 20_000), 0.0) for scale in (0.01, 0.2))
    lengths = np.full(len(small) // 32, 32)

    def moments_of(values: np.ndarray, headroom: float = 1.0) -> tuple[float, ...]:
        return calibrate_statistics(
            values, cap=0.5, lambdas=LAMBDAS[:3], lengths=lengths, headroom=headroom
        ).log_moments

    assert moments_of(small)[0] == 0.0, "its mean is below 0"
    for rate, log_moment in zip(LAMBDAS[1:3], moments_of(large)[1:], strict=True):
        assert log_moment > math.log(np.exp(rate * np.minimum(large, 0.5)).mean())
    assert all(a > b for a, b in zip(moments_of(large, 1.25)[1:], moments_of(large)[1:], strict=True))


def test_values_far_below_0_have_moments_like_any_others() -> None:
    """Powers below what 1 + x can hold: a completion's exponent is the sum of its values, not -inf."""
    values = np.where(np.arange(4_000) % 40 == 0, 0.01, -3.0)
    with np.errstate(all="raise", under="ignore"):
        (found,) = calibrate_statistics(values, cap=0.5, lambdas=(20.0,), lengths=np.full(400, 10)).log_moments
    assert math.isfinite(found)
    assert found >= 0.0


def test_values_beyond_the_cap_and_values_that_are_none_count_as_the_cap() -> None:
    moments = calibrated()
    capped = sums_of(np.array([0.5]), moments)
    for value in (7.0, math.inf, math.nan):
        assert sums_of(np.array([value]), moments) == capped


@given(st.lists(st.lists(st.floats(-1e9, 1e9), min_size=2, max_size=2), max_size=30))
def test_evidence_stays_finite_whatever_is_seen(steps: list[list[float]]) -> None:
    wealth = Wealth()
    for log_e in steps:
        wealth = updated(wealth, Sums(num_tokens=1, log_e=tuple(log_e)))
        assert math.isfinite(log_evidence({"margin": wealth}))
    assert WEALTH.validate_json(WEALTH.dump_json(wealth)) == wealth, "as it is kept in a snapshot"


def test_errors_that_go_together_within_a_completion_are_allowed_for() -> None:
    """A hard prompt makes all its tokens noisy. Moments of single tokens would ban every worker with such prompts."""
    rng, length, num = np.random.default_rng(5), 32, 4_000

    def correlated(count: int) -> np.ndarray:
        scale_C = np.where(rng.random(count) < 0.1, 0.1, 0.001)
        return rng.exponential(np.repeat(scale_C, length))

    sample, lengths = correlated(num), np.full(num, length)
    single = calibrate_statistics(sample, cap=0.5, lambdas=LAMBDAS)
    whole = calibrate_statistics(sample, cap=0.5, lambdas=LAMBDAS, lengths=lengths)
    assert all(a >= b for a, b in zip(whole.log_moments, single.log_moments, strict=True))

    def banned(moments: Moments) -> int:
        return sum(max(run(moments, [correlated(4) for _ in range(60)])) >= math.log(100) for _ in range(100))

    assert banned(single) > 20
    assert banned(whole) <= 1


def test_headroom_multiplies_what_is_allowed() -> None:
    sample = honest(np.random.default_rng(7), 20_000)
    plain, roomy = (calibrate_statistics(sample, cap=0.5, lambdas=LAMBDAS, headroom=factor) for factor in (1.0, 2.0))
    assert roomy.log_moments == pytest.approx([2 * moment for moment in plain.log_moments])


def test_a_statistic_that_the_calibration_does_not_know_says_nothing() -> None:
    sums = Sums(num_tokens=1, log_e=(3.0,))
    evidence = folded({}, {"margin": sums, "smell": sums}, statistics=("margin", "proof"))
    assert set(evidence) == {"margin", "proof"}
    assert evidence["proof"] == Wealth()
    assert evidence["margin"].num_bundles == 1
