"""Flips where claims agree closely with the forward pass: fair to honest engines, and strong against a lower temperature."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prime_protocol.calibration import is_calibrated, require_possible
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.close_flips import (
    CLOSE_FLIPS,
    CUT,
    MARGIN_MIN,
    MOMENTS,
    SLACK,
    STAKES,
    close_bets,
    close_flip_sums,
    contexts_of,
)
from prime_protocol.errors import RemoteError
from prime_protocol.evidence import BundleEvidence, Sums
from prime_protocol.excess_flips import apart

CHECKS = CheckPolicy(close_flips_seen=True)
CONTEXTS = 2_000
SHAPES = ("normal", "student", "cauchy", "rounded", "few")


def gains_and_losses(logits: np.ndarray, errors: np.ndarray, stake: float) -> tuple[float, float]:
    """Mean of `clear` and of min(d, cut), exact over tokens. Contexts [C, V]: the worker's logits and the validator's errors.

    With one noise the worker takes i, and no j leads i by the margin under the validator's p, with the probability
    1 / sum over k of max(p'_k / p'_i, exp(-margin) p_k / p_i).
    """
    mine, theirs = (each - np.logaddexp.reduce(each, axis=1, keepdims=True) for each in (logits, logits + errors))
    ratios = np.exp(mine - theirs)
    beyond = np.zeros_like(mine)
    for k in range(mine.shape[1]):
        lead = math.exp(-MARGIN_MIN) * np.exp(theirs[:, [k]]) * ratios
        beyond += np.maximum(lead - np.exp(mine[:, [k]]), 0.0)
    d = apart(mine, theirs)
    clear = np.where(d <= CUT / stake, beyond / (1 + beyond), 0.0)
    chosen = np.exp(mine)
    return float((chosen * clear).sum(axis=1).mean()), float((chosen * np.minimum(d, CUT / stake)).sum(axis=1).mean())


def errors_of(shape: str, size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    if shape == "normal":
        return rng.standard_normal(size)
    if shape == "student":
        return rng.standard_t(3, size)
    if shape == "cauchy":
        return rng.standard_cauchy(size)
    if shape == "rounded":
        return rng.choice([-1.0, 0.0, 1.0], p=[0.25, 0.5, 0.25], size=size)
    return rng.standard_normal(size) * (rng.random(size) < 0.1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("error", [1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1])
def test_honest_engines_lose_more_than_they_gain_whatever_the_scale_of_errors(shape: str, error: float) -> None:
    rng = np.random.default_rng(1)
    gains, losses = np.zeros(len(STAKES)), np.zeros(len(STAKES))
    for spread in (1.0, 2.0, 5.0):
        logits = spread * rng.standard_normal((CONTEXTS, 8))
        errors = np.clip(error * errors_of(shape, logits.shape, rng), -1.0, 1.0)
        each = np.array([gains_and_losses(logits, errors, stake) for stake in STAKES]).T
        gains, losses = gains + each[0], losses + each[1]
    assert (gains <= 0.75 * losses).all()
    assert (losses > 0).all()


@pytest.mark.parametrize("warmer", [0.002, 0.01, 0.02, 0.05])
def test_honest_engines_that_differ_like_a_temperature_lose_more_than_they_gain(warmer: float) -> None:
    logits = 2 * np.random.default_rng(2).standard_normal((CONTEXTS, 8))
    for stake in STAKES:
        gains, losses = gains_and_losses(logits, warmer * logits, stake)
        assert gains <= 0.75 * losses


def test_the_formula_is_the_mean_of_what_noise_chooses() -> None:
    rng, num = np.random.default_rng(3), 400_000
    logits, stake = rng.standard_normal(6), STAKES[0]
    errors = 0.004 * rng.standard_normal(6)
    gains, losses = gains_and_losses(logits[None], errors[None], stake)
    noise = rng.gumbel(size=(num, 6))
    chosen, rows, noisy = (logits + noise).argmax(axis=1), np.arange(num), logits + errors + noise
    mine, theirs = (each - np.logaddexp.reduce(each) for each in (logits, logits + errors))
    e = close_bets(noisy.max(axis=1) - noisy[rows, chosen], apart(mine, theirs)[chosen], stake)
    assert e.mean() == pytest.approx(1 + stake * (gains - losses - SLACK), abs=4 * e.std() / math.sqrt(num))
    assert e.mean() < 1


def test_tokens_that_follow_the_same_tokens_count_once() -> None:
    """An engine's errors in one context are the same for every completion that passes it."""
    flips, exact = np.full(8, 0.02), np.zeros(8)
    once, apart_from = (close_flip_sums(flips, exact, contexts) for contexts in (np.zeros(8, int), np.arange(8)))
    assert once.log_e == close_flip_sums(flips[:1], exact[:1], np.zeros(1, int)).log_e
    assert apart_from.log_e == pytest.approx([8 * log_e for log_e in once.log_e], abs=1e-5)
    one_of_eight = np.where(np.arange(8) == 3, 0.02, 0.0)
    mean = [np.log(np.mean(close_bets(one_of_eight, exact, stake))) for stake in STAKES]
    assert close_flip_sums(one_of_eight, exact, np.zeros(8, int)).log_e == pytest.approx(mean, abs=1e-6)


def test_contexts_are_equal_where_prompt_and_all_tokens_before_are() -> None:
    completions = [((1,), (5, 6, 7)), ((2,), (5, 6)), ((1,), (5, 8)), ((1,), ()), ((1,), (5, 6)), ((1,), (5, 6, 7, 9))]
    seen: dict[tuple[tuple[int, ...], ...], int] = {}
    expected = [(prompt, tokens[:place]) for prompt, tokens in completions for place in range(len(tokens))]
    found = contexts_of(completions).tolist()
    assert len(found) == len(expected)
    assert all(seen.setdefault(context, number) == number for context, number in zip(expected, found, strict=True))
    assert sorted(set(found)) == list(range(len(set(expected))))
    assert contexts_of([]).tolist() == []


def test_a_flip_counts_only_if_its_margin_is_clear_and_its_claim_is_close() -> None:
    stake = STAKES[-1]
    small, cut = MARGIN_MIN / 2, CUT / stake
    margins, d = np.array([0.02, small, 0.02, 0.0]), np.array([0.0, 0.0, 1.01 * cut, 1.01 * cut])
    gained, rounded, explained, apart_alone = close_bets(margins, d, stake)
    assert gained == pytest.approx(1 + stake * (1 - SLACK))
    assert rounded == pytest.approx(1 - stake * SLACK)
    assert explained == apart_alone == pytest.approx(1 - CUT)


def test_the_sums_are_taken_from_any_engine_and_calibrate_none() -> None:
    sums = close_flip_sums(np.full(8, np.inf), np.zeros(8), np.arange(8))
    evidence = BundleEvidence(worker="a", validator="b", sums={CLOSE_FLIPS: sums})
    known = CHECKS.moments_of(worker="a", validator="b")
    require_possible(evidence, known)
    silent = close_flip_sums(np.zeros(8), np.zeros(8), np.arange(8))
    assert not is_calibrated(evidence.model_copy(update={"sums": {CLOSE_FLIPS: silent}}))
    louder = Sums(num_tokens=8, log_e=tuple(8 * stake * MOMENTS.cap + 0.01 for stake in STAKES))
    with pytest.raises(RemoteError, match="above the maximum for its number of tokens"):
        require_possible(evidence.model_copy(update={"sums": {CLOSE_FLIPS: louder}}), known)
    with pytest.raises(RemoteError, match="in the run's calibration"):
        require_possible(evidence, CheckPolicy().moments_of(worker="a", validator="b"))
