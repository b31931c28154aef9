"""Excess flips: tokens that are not the seed's choice, beside what the worker's own logprobs explain.

Worker and validator compute slightly different probabilities p' and p of a token, and choose by the same Gumbel noise. Then they
choose differently with a probability of at most 2 TV / (1 + TV), TV being the distance of p' and p in total variation (correlated
sampling, arXiv 1612.01041). And 2 TV is the mean of d = |1 - p / p'| over tokens drawn from p', which the claimed logprob shows
token by token. So for an honest worker, whatever its engine, its arithmetic and the policy are,

    E[flip - d | everything before] <= 0,    and    e = 1 + stake * (flip - min(d + SLACK, 0.9 / stake))

is an e-value without any calibration. Who chooses among near ties with the right logprobs has flips that nothing explains; who
claims worse logprobs, to explain them, is held to `logprob_error_mean_max`.

Assumed: the claimed logprobs are those that it sampled by, and of what the minimum cuts off (errors above 0.2 nats, at the larger
stake) there is too little to matter. Measured in bf16: flips are 0.6 to 0.7 of the mean of d.

Letters: T tokens.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from prime_protocol.evidence import Moments, Sums

EXCESS_FLIPS = "excess_flips"
STAKES = (1.0, 4.0)
"""In the place of lambdas."""
SLACK = 1e-4
"""Flips of a token that rounding may explain: of the noise, and of the claim itself."""
MOMENTS = Moments(cap=0.7, lambdas=STAKES, log_moments=(0.0,) * len(STAKES), num_tokens=0)
"""In the form of a calibration's: log(1 + stake) is at most 0.7 stakes, and what is expected is in the e-value already."""


def apart(claimed_T: npt.NDArray[np.floating], recomputed_T: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """d [T] of the logprobs [T]; what is not a number explains nothing."""
    with np.errstate(all="ignore"):
        apart_T: npt.NDArray[np.float64] = np.abs(
            np.expm1(np.minimum(recomputed_T.astype(np.float64) - claimed_T, 80.0))
        )
    return np.where(np.isnan(apart_T), 0.0, apart_T)


def flip_sums(flips_T: npt.NDArray[np.floating], apart_T: npt.NDArray[np.floating]) -> Sums:
    """What a bundle's flips [T], 0 or 1, say beside d [T]. Rounded down, to 1e-6 nats."""
    logs = []
    for stake in STAKES:
        explained_T = np.minimum(apart_T.astype(np.float64) + SLACK, 0.9 / stake)
        logs.append(math.floor(float(np.log1p(stake * (flips_T - explained_T)).sum()) * 1e6) / 1e6)
    return Sums(num_tokens=len(flips_T), log_e=tuple(logs))
