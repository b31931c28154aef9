"""Shading: claimed logprobs that are below or above the ones by which the tokens were sampled, everywhere or by reward.

A trainer divides by the claimed probability, so a worker that claims too little where its completion is rewarded has the policy
learn more from it. The size of a difference does not show that: honest engines differ as much. Its sign does.

Let p' be the probability that the worker claims for a token and p the recomputed one. A worker that sampled by p' satisfies

    E[p / p' - 1 | everything before] = 0

since p is a distribution over the same tokens, whatever it is: another engine, arithmetic or policy. So with y = p / p' - 1,
e = 1 + stake * (y - SLACK) and e = 1 + stake * (-y - SLACK) are e-values without any calibration, at stake 1 the likelihood ratio
of "sampled by p, claimed p'". `shading` multiplies them over all tokens of a bundle.

`shading_by_reward` multiplies over the tokens of the completions whose reward is above their group's mean, and over those below
it. The class of a completion is known after its tokens only. If f is 1 for a completion in the class and e is its product, then
E[e^f] = 1 + Q(class) - P'(class), where Q is the distribution whose density over P' is e: at stake 1 the validator's. So
REWARD_SLACK * stake is taken off for each completion, in the class or not.

Assumed: the claimed logprobs are those that the tokens were sampled by, to SLACK; the chance to be above the mean, or below,
differs between worker and validator by REWARD_SLACK at most on average; and of what is cut off (y beyond 0.9 / stake against the
bet) there is too little to matter. Measured in bf16: scripts/bench/shading.py.

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
STAKES = (1.0, 4.0)
"""In the place of lambdas."""
SLACK = 3e-4
"""Of a token: what rounding of the claim may shift its probability by, relatively, and what is cut off may hide."""
REWARD_SLACK = 0.02
"""Of a completion: by how much two engines' chances of a reward may differ."""
RISE_MAX = 1.0
"""y counts as this at most."""
Floats = npt.NDArray[np.float64]

MOMENTS = Moments(cap=RISE_MAX, lambdas=2 * STAKES, log_moments=(0.0,) * 2 * len(STAKES), num_tokens=0)
"""Of `shading`, in the form of a calibration's: log(1 + stake * y) is at most stake * RISE_MAX."""
MOMENTS_BY_REWARD = Moments(cap=RISE_MAX, lambdas=4 * STAKES, log_moments=(0.0,) * 4 * len(STAKES), num_tokens=0)


def rises(claimed_T: npt.NDArray[np.floating], recomputed_T: npt.NDArray[np.floating]) -> Floats:
    """y [T] of the logprobs [T]; what is not a number says nothing here."""
    with np.errstate(all="ignore"):
        rises_T: Floats = np.expm1(np.clip(recomputed_T.astype(np.float64) - claimed_T, -80.0, 80.0))
    return np.where(np.isnan(rises_T), 0.0, rises_T)


def shading_sums(rises_T: Floats) -> Sums:
    """Of all tokens of a bundle: claimed too low at each stake, then claimed too high. Rounded down, to 1e-6 nats."""
    logs = [_logs(sign * rises_T, stake).sum() for sign in (1.0, -1.0) for stake in STAKES]
    return Sums(num_tokens=len(rises_T), log_e=_rounded(logs))


def by_reward_sums(rises_T: Floats, owners_T: npt.NDArray[np.integer], classes_N: npt.NDArray[np.integer]) -> Sums:
    """The same of the completions above their group's mean (class 1), then of those below it (class -1).

    `owners_T` [T]: the completion of each token; `classes_N` [N]: 0 for a completion of a group whose rewards are all alike.
    Completions without a reward are left out of both, with their tokens.
    """
    classes_T = classes_N[owners_T] if len(owners_T) else np.zeros(0, np.int64)
    logs = []
    for each in (1, -1):
        mine_T = rises_T[classes_T == each]
        logs += [
            _logs(sign * mine_T, stake).sum() - len(classes_N) * math.log1p(stake * REWARD_SLACK)
            for sign in (1.0, -1.0)
            for stake in STAKES
        ]
    return Sums(num_tokens=len(rises_T), log_e=_rounded(logs))


def reward_classes(groups: Sequence[Sequence[float]]) -> npt.NDArray[np.int64]:
    """The class of each completion [N], by the finite rewards of each group: 1 above its mean, -1 below, 0 at it."""
    found: list[int] = []
    for rewards in groups:
        low, high = min(rewards, default=0.0), max(rewards, default=0.0)
        scaled = [0.0 if low == high else (reward / 2 - low / 2) / (high / 2 - low / 2) for reward in rewards]
        mean = math.fsum(scaled) / max(1, len(scaled))
        found += [0 if low == high else int(value > mean) - int(value < mean) for value in scaled]
    return np.array(found, np.int64)


def _logs(against_T: Floats, stake: float) -> Floats:
    return np.log1p(stake * np.clip(against_T - SLACK, -0.9 / stake, RISE_MAX))


def _rounded(logs: Sequence[float]) -> tuple[float, ...]:
    return tuple(math.floor(float(each) * 1e6) / 1e6 for each in logs)
