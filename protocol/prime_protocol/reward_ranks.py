"""Reward ranks: whether a worker's rewards resemble those of trusted rollouts of the same prompt.

If the coordinator does not assign the randomness, a worker can sample several times and upload the best. Its tokens are then the
policy's own, so no check of tokens detects this. Rewards do, compared with those of completions that a validator
sampled from the same policy for the same prompt. If the worker is honest, all are draws from one distribution, and
which of the pooled rewards are the worker's is a uniformly random choice, whatever that distribution is. So, given the
pooled rewards,

    e(lambda) = exp(lambda * sum of the worker's scores) / mean of the same over all choices of as many of the pooled rewards

has a mean of exactly 1: an e-value that needs no calibration (a permutation test's likelihood ratio). Scores are
midranks: ties and the scale of rewards do not matter. The mean is exact, in N (N + M) additions.

Differences that engine arithmetic causes in honest rewards do not accumulate either. At the smallest rate evidence
shrinks unless the worker's reward is the better one of a pair in more than 55 of 100 (ties count half). For rewards of
0 or 1 it shrinks unless the worker's success rate exceeds the trusted p by more than 0.3 p (1 - p).

Letters: N rewards of the worker, M trusted ones; R rates.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prime_protocol.evidence import Moments, Sums

REWARD_RANKS = ("rewards_above", "rewards_below")
"""Statistics: whether the worker's rewards rank above the trusted ones, and whether they rank below."""
RATES = (1.5, 3.0, 6.0)
"""Lambdas. Suited to best-of-2, best-of-3 and best-of-8, for an answer that is right three times in ten."""
MOMENTS = Moments(cap=0.5, lambdas=RATES, log_moments=(0.0,) * len(RATES), num_tokens=0)
"""Moments in a calibration's form: no score is above 0.5, and the e-value already contains the expectation."""


def scores(rewards: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return midranks [N] of the rewards [N], moved and scaled to [-0.5, 0.5]; their mean is 0."""
    ordered = np.sort(rewards)
    places = np.searchsorted(ordered, rewards, "left") + np.searchsorted(ordered, rewards, "right")
    return places / (2 * len(rewards)) - 0.5


def rank_sums(groups: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, Sums]:
    """Sum the evidence of a bundle's rewards: per group the worker's [N] and the trusted ones [M], all finite."""
    pairs = [(mine, trusted) for mine, trusted in groups if mine and trusted]
    if not pairs:
        return {}
    num = sum(len(mine) for mine, _ in pairs)
    logs = sum(_log_e(mine, trusted) for mine, trusted in pairs)
    rounded = np.floor(logs * 1e6) / 1e6
    return {
        name: Sums(num_tokens=num, log_e=tuple(each.tolist()))
        for name, each in zip(REWARD_RANKS, np.split(rounded, len(REWARD_RANKS)), strict=True)
    }


def _log_e(mine: Sequence[float], trusted: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return log e for each of the RATES above, then for each below."""
    rates = np.array([*RATES, *(-rate for rate in RATES)])
    exponents_RN = rates[:, None] * scores(np.array([*mine, *trusted], dtype=np.float64))
    own_R: npt.NDArray[np.float64] = exponents_RN[:, : len(mine)].sum(axis=1)
    return own_R - _log_means_over_choices(exponents_RN, len(mine))


def _log_means_over_choices(exponents_RN: npt.NDArray[np.float64], num: int) -> npt.NDArray[np.float64]:
    """Return the log of the mean of exp(the sum of `num` of a row) over all choices, each equally likely.

    It works in logarithms because a large group's sums exceed floats.
    """
    log_means, sizes = np.full((len(exponents_RN), num + 1), -np.inf), np.arange(num + 1)
    log_means[:, 0] = 0.0
    with np.errstate(divide="ignore"):
        for seen, exponents in enumerate(
            exponents_RN.T, 1
        ):  # this one is in a choice of k among `seen` with probability k / seen
            left_out = np.log(np.maximum(seen - sizes, 0) / seen) + log_means
            taken = np.log(sizes[1:] / seen) + exponents[:, None] + log_means[:, :-1]
            log_means = np.concatenate([left_out[:, :1], np.logaddexp(left_out[:, 1:], taken)], axis=1)
    return log_means[:, num]
