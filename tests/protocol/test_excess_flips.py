"""Flips beyond those that claimed logprobs explain: fair to every honest engine, and not to a chooser among near ties."""

from __future__ import annotations

import math

import numpy as np
import pytest

from prime_protocol.calibration import is_calibrated, require_possible
from prime_protocol.check_policy import EVIDENCE_MAX, CheckPolicy
from prime_protocol.errors import RemoteError
from prime_protocol.evidence import BundleEvidence, Sums, folded, log_evidence
from prime_protocol.excess_flips import EXCESS_FLIPS, MOMENTS, SLACK, STAKES, apart, flip_sums

CHECKS = CheckPolicy(flips_explained=True)


@pytest.mark.parametrize("error", [1e-3, 0.02, 0.2, 3.0])
def test_two_engines_choose_differently_no_oftener_than_their_probabilities_explain(error: float) -> None:
    rng = np.random.default_rng(1)
    for _ in range(50):
        logits = 2 * rng.standard_normal(12)
        both = np.stack([logits + error * rng.standard_normal(12) for _ in range(2)])
        mine, theirs = np.exp(both) / np.exp(both).sum(axis=1, keepdims=True)
        # With one noise both take x with the probability 1 / sum over y of max(p'_y / p'_x, p_y / p_x).
        ratios = np.maximum(mine[None, :] / mine[:, None], theirs[None, :] / theirs[:, None])
        flips = 1 - (1 / ratios.sum(axis=1)).sum()
        explained = (mine * apart(np.log(mine), np.log(theirs))).sum()
        assert explained == pytest.approx(np.abs(mine - theirs).sum())
        assert flips <= explained


def test_sampled_by_one_noise_the_e_values_have_a_mean_of_at_most_one() -> None:
    rng, num = np.random.default_rng(2), 40_000
    logits = 2 * rng.standard_normal(12)
    other = logits + 0.1 * rng.standard_normal(12)
    log_mine, log_theirs = (each - np.log(np.exp(each).sum()) for each in (logits, other))
    noise = rng.gumbel(size=(num, 12))
    chosen = (logits + noise).argmax(axis=1)
    flips = chosen != (other + noise).argmax(axis=1)
    assert flips.mean() > 0.01
    explained = apart(log_mine[chosen], log_theirs[chosen]) + SLACK
    for stake in STAKES:
        e = 1 + stake * (flips - np.minimum(explained, 0.9 / stake))
        assert e.mean() < 1 + 4 * e.std() / math.sqrt(num)
    assert max(flip_sums(flips.astype(np.float32), explained).log_e) < 0


def test_choices_among_near_ties_with_the_right_logprobs_add_up_to_a_ban() -> None:
    flips = np.zeros(48)
    flips[7] = 1  # one in a bundle, as many as `seed_flips_share_max` lets pass
    wealth = folded({}, {}, statistics=CHECKS.statistics)
    for _ in range(12):
        wealth = folded(wealth, {EXCESS_FLIPS: flip_sums(flips, np.zeros(48))}, statistics=CHECKS.statistics)
    assert log_evidence(wealth) >= math.log(EVIDENCE_MAX)
    as_far_as_allowed = apart(np.full(48, -1.0), np.full(48, -1.01))
    assert flip_sums(np.zeros(48), as_far_as_allowed).log_e[1] < -1.8, "and worse claims cost what they explain"


def test_claims_that_are_no_numbers_explain_nothing() -> None:
    assert apart(np.array([np.nan, -1.0]), np.array([-1.0, np.nan])).tolist() == [0.0, 0.0]
    sums = flip_sums(np.ones(1), apart(np.array([-np.inf]), np.array([-1.0])))
    assert all(math.isfinite(log_e) for log_e in sums.log_e)


def test_the_sums_are_taken_from_any_engine_and_calibrate_none() -> None:
    evidence = BundleEvidence(worker="a", validator="b", sums={EXCESS_FLIPS: flip_sums(np.ones(8), np.zeros(8))})
    known = CHECKS.moments_of(worker="a", validator="b")
    require_possible(evidence, known)
    assert not is_calibrated(
        evidence.model_copy(update={"sums": {EXCESS_FLIPS: flip_sums(np.zeros(8), np.zeros(8))}})
    ), "statistics that hold for any engine do not show how far two engines differ"
    louder = Sums(num_tokens=8, log_e=tuple(8 * stake * MOMENTS.cap + 0.01 for stake in STAKES))
    with pytest.raises(RemoteError, match="above the maximum for its number of tokens"):
        require_possible(evidence.model_copy(update={"sums": {EXCESS_FLIPS: louder}}), known)
    with pytest.raises(RemoteError, match="in the run's calibration"):
        require_possible(evidence, CheckPolicy().moments_of(worker="a", validator="b"))
