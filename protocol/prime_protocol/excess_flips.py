"""Excess flips: tokens other than the seed's choice, beyond those that the worker's own logprobs explain.

Worker and validator compute slightly different probabilities p' and p of a token, and choose by the same Gumbel noise.
They choose differently with a probability of at most 2 TV / (1 + TV), where TV is the total variation distance of p'
and p (correlated sampling, arXiv 1612.01041). 2 TV is the mean of d = |1 - p / p'| over tokens drawn from p', and the
claimed logprob reveals d token by token. So for an honest worker, with any engine, arithmetic and policy,

    E[flip - d | everything before] <= 0,    and    e = 1 + stake * (flip - min(d + SLACK, 0.9 / stake))

is an e-value without any calibration. A worker that chooses among near-ties and claims the right logprobs has
unexplained flips. If it claims worse logprobs to explain them, `logprob_error_mean_max` limits it.

Assumptions: the worker sampled by the claimed logprobs, and the part that the minimum cuts off (errors above 0.2 nats,
at the larger stake) is negligible. Measured in bf16: flips are 0.6 to 0.7 of the mean of d.

Letters: T tokens.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from prime_protocol.evidence import Moments, Sums

EXCESS_FLIPS = "excess_flips"
STAKES = (1.0, 4.0)
"""Stakes, used instead of lambdas."""
SLACK = 1e-4
"""Flips of a token that rounding of the noise and of the claim may explain."""
MOMENTS = Moments(cap=0.7, lambdas=STAKES, log_moments=(0.0,) * len(STAKES), num_tokens=0)
"""Moments in a calibration's form: log(1 + stake) is at most 0.7 stakes; the e-value already contains the expectation."""


def apart(claimed_T: npt.NDArray[np.floating], recomputed_T: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Compute d [T] from the logprobs [T]; NaN explains nothing."""
    with np.errstate(all="ignore"):
        apart_T: npt.NDArray[np.float64] = np.abs(
            np.expm1(np.minimum(recomputed_T.astype(np.float64) - claimed_T, 80.0))
        )
    return np.where(np.isnan(apart_T), 0.0, apart_T)


def flip_sums(flips_T: npt.NDArray[np.floating], apart_T: npt.NDArray[np.floating]) -> Sums:
    """Sum the evidence of a bundle's flips [T], 0 or 1, given d [T]. Rounded down, to 1e-6 nats."""
    logs = []
    for stake in STAKES:
        explained_T = np.minimum(apart_T.astype(np.float64) + SLACK, 0.9 / stake)
        logs.append(math.floor(float(np.log1p(stake * (flips_T - explained_T)).sum()) * 1e6) / 1e6)
    return Sums(num_tokens=len(flips_T), log_e=tuple(logs))
