"""Shaded logprobs: e-values that are fair to every honest engine, and add up against shifted claims."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from prime_protocol.calibration import is_calibrated, require_possible
from prime_protocol.check_policy import EVIDENCE_MAX, CheckPolicy
from prime_protocol.errors import RemoteError
from prime_protocol.evidence import BundleEvidence, Sums, folded, log_evidence
from prime_protocol.shading import (
    MOMENTS,
    MOMENTS_BY_REWARD,
    REWARD_SLACK,
    SHADING,
    SHADING_BY_REWARD,
    SLACKS,
    STAKES,
    bets,
    by_reward_sums,
    reward_classes,
    rises,
    shading_sums,
)

CHECKS = CheckPolicy(shading_seen=True)


def distributions(error: float, seed: int, size: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Return a worker's sampling probabilities and a validator's, this far apart."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.standard_normal(size)
    both = np.stack([logits + error * rng.standard_normal(size) for _ in range(2)])
    mine, theirs = np.exp(both) / np.exp(both).sum(axis=1, keepdims=True)
    return mine, theirs


@pytest.mark.parametrize("error", [1e-6, 1e-3, 0.02, 0.05, 0.08, 0.12, 0.2])
def test_the_e_value_of_an_honest_token_has_a_mean_of_at_most_one_however_large_errors_are(error: float) -> None:
    """Exact over tokens, and the mean over contexts, whose errors are equally likely in both directions."""
    means = [mean_of_e(*distributions(error, seed)) for seed in range(400)]
    assert np.mean(means, axis=0).max() <= 1.0


@pytest.mark.parametrize("error", [1e-6, 1e-3, 0.01])
def test_errors_that_no_cut_touches_have_a_mean_of_at_most_one_in_every_context(error: float) -> None:
    assert max(mean_of_e(*distributions(error, seed)).max() for seed in range(400)) <= 1.0 + 1e-9


@pytest.mark.parametrize("exponent", [0.98, 0.99, 1.01, 1.02])
def test_engines_that_differ_like_a_temperature_of_two_percent_have_a_mean_of_at_most_one(exponent: float) -> None:
    means = []
    for seed in range(400):
        mine, _ = distributions(0.0, seed)
        means.append(mean_of_e(mine, mine**exponent / (mine**exponent).sum()))
    assert np.mean(means, axis=0).max() <= 1.0


def mean_of_e(mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the mean of each e-value of `shading` over one token, exact."""
    against = theirs / mine - 1
    return np.array([mine @ np.exp(bets(sign * against, stake)) for sign in (1.0, -1.0) for stake in STAKES])


def test_an_engine_that_is_flatter_than_the_validator_s_is_not_against_the_null() -> None:
    """Claims lower its likely tokens and raise its unlikely ones, far from symmetrically: only the mean must be 0."""
    mine, theirs = np.array([0.896, 0.104]), np.array([0.9, 0.1])
    logs = np.array([shading_sums(rises(np.log(mine[[token]]), np.log(theirs[[token]]))).log_e for token in (0, 1)])
    assert (mine @ np.exp(logs)).max() <= 1.0


@pytest.mark.parametrize("chance_differs", [0.0, 0.0075, 0.015])
def test_by_reward_an_honest_group_has_a_mean_of_at_most_one_where_chances_differ_by_the_slack(
    chance_differs: float,
) -> None:
    """All groups of three one-token completions; token 0 is rewarded. Exact. Three of four completions are in a class."""
    mine = np.array([0.5 - chance_differs, 0.5 + chance_differs])
    theirs = np.array([0.5, 0.5])
    mean = np.zeros(4 * len(STAKES))
    for tokens in itertools.product((0, 1), repeat=3):
        chosen = np.array(tokens)
        sums = by_reward_sums(
            rises(np.log(mine[chosen]), np.log(theirs[chosen])),
            np.arange(3),
            reward_classes([[float(token == 0) for token in tokens]]),
        )
        mean += mine[chosen].prod() * np.exp(np.array(sums.log_e))
    assert mean.max() <= 1.0


def nats_after(bundles: int, moved: dict[int, float], *, tokens: int, noise: float = 0.005) -> float:
    """Return the evidence after this many bundles of 8 completions, 3 of them rewarded, with claims shifted by class."""
    rng = np.random.default_rng(7)
    wealth = folded({}, {}, statistics=(*CHECKS.statistics, *(f"of tokens {number}" for number in range(7))))
    for _ in range(bundles):
        classes = reward_classes([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
        owners = np.repeat(np.arange(8), tokens)
        trusted = np.full(8 * tokens, -1.0)
        claimed = trusted + noise * rng.standard_normal(len(trusted)) + np.array([moved[c] for c in classes])[owners]
        rises_T = rises(claimed, trusted)
        sums = {SHADING: shading_sums(rises_T), SHADING_BY_REWARD: by_reward_sums(rises_T, owners, classes)}
        wealth = folded(wealth, sums, statistics=tuple(wealth))
    return log_evidence(wealth)


@pytest.mark.parametrize(
    ("moved", "tokens", "bundles"),
    [
        ({1: -0.1, -1: 0.0}, 32, 2),
        ({1: -0.05, -1: 0.0}, 32, 2),
        ({1: -0.05, -1: 0.0}, 8, 8),
        ({1: -0.1, -1: 0.1}, 32, 2),
        ({1: 0.0, -1: -0.05}, 32, 2),
        ({1: 0.1, -1: 0.0}, 32, 2),
        ({1: -0.0095, -1: -0.0095}, 32, 4),
    ],
    ids=str,
)
def test_moved_claims_add_up_to_a_ban_within_64_rollouts(moved: dict[int, float], tokens: int, bundles: int) -> None:
    assert 8 * bundles <= 64
    assert nats_after(bundles, moved, tokens=tokens) >= math.log(EVIDENCE_MAX)
    assert nats_after(64, {1: 0.0, -1: 0.0}, tokens=tokens) < 0


def test_classes_are_by_the_group_s_own_mean_and_a_flat_group_has_none() -> None:
    assert reward_classes([[1.0, 0.0, 0.0], [2.0, 2.0], [], [-1e308, 1e308, 0.0]]).tolist() == [
        *(1, -1, -1),
        *(0, 0),
        *(-1, 1, 0),
    ]


def test_what_is_no_number_says_nothing_and_sums_stay_finite() -> None:
    rises_T = rises(np.array([np.nan, -1.0, -np.inf, -1e30]), np.array([-1.0, np.nan, -1.0, -1.0]))
    assert rises_T[:2].tolist() == [0.0, 0.0]
    assert all(math.isfinite(log_e) for log_e in shading_sums(rises_T).log_e)
    empty = by_reward_sums(np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert max(empty.log_e) <= 0.0


def test_the_sums_are_taken_from_any_engine_are_bounded_and_calibrate_none() -> None:
    loudest = np.full(8, 80.0)
    classes = reward_classes([[1.0] * 4 + [0.0] * 4])
    sums = {
        SHADING: shading_sums(loudest),
        SHADING_BY_REWARD: by_reward_sums(loudest, np.arange(8), classes),
    }
    evidence = BundleEvidence(worker="a", validator="b", sums=sums)
    known = CHECKS.moments_of(worker="a", validator="b")
    require_possible(evidence, known)
    assert not is_calibrated(BundleEvidence(worker="a", validator="b", sums={}))
    assert not is_calibrated(evidence.model_copy(update={"sums": {SHADING: shading_sums(np.zeros(8))}})), (
        "statistics that hold for any engine do not show how far two engines differ"
    )
    for name, moments in ((SHADING, MOMENTS), (SHADING_BY_REWARD, MOMENTS_BY_REWARD)):
        louder = Sums(num_tokens=8, log_e=tuple(8 * rate * moments.cap + 0.01 for rate in moments.lambdas))
        with pytest.raises(RemoteError, match="above the maximum for its number of tokens"):
            require_possible(evidence.model_copy(update={"sums": {name: louder}}), known)
    with pytest.raises(RemoteError, match="in the run's calibration"):
        require_possible(evidence, CheckPolicy().moments_of(worker="a", validator="b"))


def test_the_slack_of_rewards_is_paid_by_every_completion_in_a_class() -> None:
    classes = reward_classes([[1.0, 0.0]] * 4 + [[1.0, 1.0]])
    sums = by_reward_sums(np.zeros(10), np.arange(10), classes)
    assert sums.log_e[0] == pytest.approx(-8 * math.log1p(REWARD_SLACK) + 4 * math.log1p(-SLACKS[0]), abs=1e-5)
