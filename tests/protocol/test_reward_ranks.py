"""Rewards compared with trusted ones: an e-value for any rewards, which detects a worker that uploads the best of several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from pydantic import ValidationError

from prime_protocol.calibration import require_possible
from prime_protocol.check_policy import EVIDENCE_MAX, CheckPolicy
from prime_protocol.errors import RemoteError
from prime_protocol.evidence import BundleEvidence, ComparedRewards, Sums, folded, log_evidence
from prime_protocol.limits import COMPARED_REWARDS_MAX
from prime_protocol.reward_ranks import MOMENTS, RATES, REWARD_RANKS, rank_sums

SIZE = 8
"""Number of rewards of a group, and of its references."""


@pytest.mark.parametrize(
    "pooled",
    [(0.0, 0.1, 0.5, 0.7, 0.9, 1.0), (0.0, 0.0, 0.0, 1.0, 1.0, 1.0), (-3.0, 0.2, 0.2, 0.2, 0.9, 1e9), (0.5,) * 6],
)
@pytest.mark.parametrize("num", [1, 3, 5])
def test_over_all_ways_in_which_chance_deals_the_rewards_each_e_value_has_the_mean_one(
    pooled: tuple[float, ...], num: int
) -> None:
    dealt = []
    for chosen in itertools.combinations(range(len(pooled)), num):
        mine = [pooled[index] for index in chosen]
        trusted = [reward for index, reward in enumerate(pooled) if index not in chosen]
        dealt.append([sums.log_e for sums in rank_sums([(mine, trusted)]).values()])
    means = np.exp(np.array(dealt)).mean(axis=0)
    assert means == pytest.approx(np.ones((len(REWARD_RANKS), len(RATES))), abs=2e-5)


def test_equal_rewards_and_missing_ones_say_nothing() -> None:
    assert rank_sums([]) == rank_sums([([], [1.0]), ([1.0], [])]) == {}
    assert all(log_e == 0.0 for sums in rank_sums([([1.0] * 4, [1.0] * 3)]).values() for log_e in sums.log_e)


def test_a_bundles_groups_multiply_and_large_ones_stay_finite_and_possible() -> None:
    one, two = rank_sums([([1.0], [0.0])]), rank_sums([([1.0], [0.0]), ([2.0], [1.0])])
    for name in REWARD_RANKS:
        assert two[name].log_e == pytest.approx([2 * log_e for log_e in one[name].log_e], abs=1e-5)
    best, worst = rank_sums([([1.0] * 512, [0.0] * 512)]).values()
    assert all(math.isfinite(log_e) for log_e in worst.log_e)
    assert min(best.log_e) > 100
    require_possible(
        BundleEvidence(worker="a", validator="b", sums={"rewards_above": best}),
        CheckPolicy(unseeded=True, reference_share=0.5).moments_of(worker="a", validator="b"),
    )


def test_sent_rewards_that_do_not_give_the_sums_are_refused() -> None:
    groups = (ComparedRewards(mine=(1.0, 0.5), trusted=(0.0, 0.5)), ComparedRewards(mine=(0.0,), trusted=(0.25,)))
    sums = rank_sums([(one.mine, one.trusted) for one in groups])
    honest = BundleEvidence(worker="a", validator="b", sums=sums, compared=groups)
    known = CheckPolicy(unseeded=True, reference_share=0.5).moments_of(worker="a", validator="b")
    require_possible(honest, known)
    louder = sums["rewards_above"].model_copy(
        update={"log_e": tuple(log_e + 0.01 for log_e in sums["rewards_above"].log_e)}
    )
    changes: list[dict[str, object]] = [
        {"compared": (groups[0], groups[1].model_copy(update={"mine": (0.5,)}))},
        {"compared": groups[:1]},
        {"sums": {**sums, "rewards_above": louder}},
        {"sums": {"rewards_above": sums["rewards_above"]}},
        {"sums": {}},
    ]
    for changed in changes:
        with pytest.raises(RemoteError, match="do not match the compared rewards"):
            require_possible(honest.model_copy(update=changed), known)
    one_more = ComparedRewards(mine=(0.0,) * COMPARED_REWARDS_MAX, trusted=(1.0,))
    with pytest.raises(ValidationError, match="compared rewards are allowed"):
        BundleEvidence(worker="a", validator="b", sums=sums, compared=(one_more,))


def test_more_than_ranks_can_say_and_ranks_where_the_run_compares_none_are_refused() -> None:
    checks = CheckPolicy(unseeded=True, reference_share=0.5)
    forged = Sums(num_tokens=8, log_e=tuple(8 * rate * MOMENTS.cap + 0.01 for rate in RATES))
    evidence = BundleEvidence(worker="a", validator="b", sums={"rewards_above": forged})
    with pytest.raises(RemoteError, match="above the maximum for its number of tokens"):
        require_possible(evidence, checks.moments_of(worker="a", validator="b"))
    honest = evidence.model_copy(update={"sums": rank_sums([([1.0], [0.0])])})
    for other in (CheckPolicy(unseeded=True), CheckPolicy(reference_share=0.5)):
        assert other.statistics == ()
        with pytest.raises(RemoteError, match="in the run's calibration"):
            require_possible(honest, other.moments_of(worker="a", validator="b"))


BY_SUCCESSES = [[rank_sums([([1.0] * a + [0.0] * (SIZE - a), [1.0] * b + [0.0] * (SIZE - b))])
                 for b in range(SIZE + 1)] for a in range(SIZE + 1)]  # fmt: skip
"""Return the evidence of a group of 0 and 1, by the number of ones of the worker and of the trusted side."""


def evidence_over(groups: int, seed: int, success: Callable[[float], float]) -> list[float]:
    """Return the nats after each group of a worker with this share of right answers, where trusted ones are right with p."""
    rng, wealth, logs = np.random.default_rng(seed), folded({}, {}, statistics=REWARD_RANKS), []
    for p in rng.beta(0.8, 1.2, groups):
        mine, trusted = int(rng.binomial(SIZE, success(p))), int(rng.binomial(SIZE, p))
        wealth = folded(wealth, BY_SUCCESSES[mine][trusted], statistics=REWARD_RANKS)
        logs.append(log_evidence(wealth))
    return logs


def test_honest_workers_stay_far_from_a_ban_and_so_do_those_whose_engine_is_a_little_better() -> None:
    highest = [max(evidence_over(120, seed, lambda p: p)) for seed in range(200)]
    assert np.mean(np.array(highest) >= math.log(10)) <= 0.1
    assert max(highest) < math.log(1_000)
    assert evidence_over(1_500, 7, lambda p: p + 0.25 * p * (1 - p))[-1] < 0


@pytest.mark.parametrize(("num", "groups_max"), [(2, 120), (4, 30), (8, 15)])
def test_the_best_of_several_samples_is_found_and_so_is_the_worst(num: int, groups_max: int) -> None:
    for success in (lambda p: 1 - (1 - p) ** num, lambda p: p**num):
        needed = [
            next(
                (n for n, log_m in enumerate(evidence_over(200, seed, success), 1) if log_m >= math.log(EVIDENCE_MAX)),
                999,
            )
            for seed in range(9)
        ]
        assert np.median(needed) <= groups_max
