"""Shading: claimed logprobs that are below or above those by which the tokens were sampled, overall or by reward.

A trainer divides by the claimed probability. A worker that claims too little for rewarded completions therefore makes
the policy learn more from them. The size of a difference does not reveal that, because honest engines differ as much.
Its sign does.

Let p' be the probability that the worker claims for a token and p the recomputed one. A worker that sampled by p'
satisfies

    E[p / p' - 1 | everything before] = 0

since p is a distribution over the same tokens, for any engine, arithmetic or policy. So with y = p / p' - 1 and a sign
s, e = 1 + stake * (s y - slack) is an e-value without any calibration, as long as it is above 0. At stake 1 and s = 1
it always is, up to the slack: e is then the likelihood ratio of "sampled by p, claimed p'". Larger stakes detect small
shifts sooner, and need a cut: s y counts as CUT_BELOW / stake at least. Errors of a noisy engine beyond the cut would
then add up to a gain. So s y counts as CUTS_ABOVE / stake at most, which is nearer to 0: symmetric errors lose by the
two cuts together, as tested up to 0.2 nats. `shading` multiplies e over all tokens of a bundle.

`shading_by_reward` multiplies over the tokens of the completions whose reward is above their group's mean, and over
those below it. The class of a completion is known only after its tokens. If f is 1 for a completion in the class and e
is its product, then E[e^f] = 1 + Q(class) - P'(class), where Q is the distribution whose density over P' is e: at stake
1 the validator's. So REWARD_SLACK * stake is subtracted for each completion of a group whose rewards differ, in the
class or not.

Assumptions, on average over contexts: the tokens were sampled by the claimed logprobs, up to the slack. Of what the
cuts remove, no more is below than above, up to the slack. The chance to be above the mean, or below, differs between
worker and validator by at most REWARD_SLACK times the chance to be either. Tested for errors up to 0.2 nats. A
systematic difference of engines that acts like a temperature is within the slack up to 2 %. Measured by
scripts/bench/shading.py and scripts/bench/honest_lives.py.

Letters: T tokens, N completions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from prime_protocol.evidence import Moments, Sums

SHADING = "shading"
SHADING_BY_REWARD = "shading_by_reward"
STAKES = (1.0, 4.0, 16.0)
"""Stakes, used instead of lambdas."""
SLACKS = (3e-4, 3e-4, 2e-3)
"""Slack of a token, by stake: the relative shift of its probability that rounding of the claim and the cuts may explain."""
CUT_BELOW, CUTS_ABOVE = 0.9, (0.4, 0.6, 0.6)
"""Bounds of stake * (s y - slack), by stake: at least -CUT_BELOW, at most CUTS_ABOVE. The upper bound is smaller at
stake 1, because -y is at most 1."""
REWARD_SLACK = 0.02
"""Slack of a completion: how much two engines' chances of a reward may differ."""
Floats = npt.NDArray[np.float64]

MOMENTS = Moments(cap=max(CUTS_ABOVE), lambdas=2 * STAKES, log_moments=(0.0,) * 2 * len(STAKES), num_tokens=0)
"""Moments of `shading` in a calibration's form: log(1 + cut) is at most stake * cap."""
MOMENTS_BY_REWARD = Moments(cap=max(CUTS_ABOVE), lambdas=4 * STAKES, log_moments=(0.0,) * 4 * len(STAKES), num_tokens=0)


def rises(claimed_T: npt.NDArray[np.floating], recomputed_T: npt.NDArray[np.floating]) -> Floats:
    """Compute y [T] from the logprobs [T]; NaN counts as 0."""
    with np.errstate(all="ignore"):
        rises_T: Floats = np.expm1(np.clip(recomputed_T.astype(np.float64) - claimed_T, -80.0, 80.0))
    return np.where(np.isnan(rises_T), 0.0, rises_T)


def shading_sums(rises_T: Floats) -> Sums:
    """Sum the evidence of all tokens of a bundle: claimed too low at each stake, then too high. Rounded down, to 1e-6 nats."""
    logs = [bets(sign * rises_T, stake).sum() for sign in (1.0, -1.0) for stake in STAKES]
    return Sums(num_tokens=len(rises_T), log_e=_rounded(logs))


def by_reward_sums(rises_T: Floats, owners_T: npt.NDArray[np.integer], classes_N: npt.NDArray[np.integer]) -> Sums:
    """Sum the same for the completions above their group's mean (class 1), then for those below it (class -1).

    `owners_T` [T] is the completion of each token. `classes_N` [N] is 0 for a completion of a group with equal rewards.
    Completions without a reward are left out of both, with their tokens.
    """
    classes_T = classes_N[owners_T] if len(owners_T) else np.zeros(0, np.int64)
    num_paid = int(np.count_nonzero(classes_N))
    logs = []
    for each in (1, -1):
        mine_T = rises_T[classes_T == each]
        logs += [
            bets(sign * mine_T, stake).sum() - num_paid * math.log1p(stake * REWARD_SLACK)
            for sign in (1.0, -1.0)
            for stake in STAKES
        ]
    return Sums(num_tokens=len(rises_T), log_e=_rounded(logs))


def reward_classes(groups: Sequence[Sequence[float]]) -> npt.NDArray[np.int64]:
    """Return the class of each completion [N], by the finite rewards of each group: 1 above its mean, -1 below, 0 at it."""
    found: list[int] = []
    for rewards in groups:
        low, high = min(rewards, default=0.0), max(rewards, default=0.0)
        scaled = [0.0 if low == high else (reward / 2 - low / 2) / (high / 2 - low / 2) for reward in rewards]
        mean = math.fsum(scaled) / max(1, len(scaled))
        found += [0 if low == high else int(value > mean) - int(value < mean) for value in scaled]
    return np.array(found, np.int64)


def bets(against_T: Floats, stake: float) -> Floats:
    """Return log e of each token [...] at one of STAKES, of s y [...]."""
    which = STAKES.index(stake)
    return np.log1p(np.clip(stake * (against_T - SLACKS[which]), -CUT_BELOW, CUTS_ABOVE[which]))


def _rounded(logs: Sequence[float]) -> tuple[float, ...]:
    return tuple(math.floor(float(each) * 1e6) / 1e6 for each in logs)
