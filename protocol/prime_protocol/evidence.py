"""Evidence against a worker: e-values that accumulate over its life and may be checked after every bundle.

An e-value is a non-negative statistic whose mean is at most 1 for an honest worker. Evidence is a process M_0 = 1, M_1,
M_2, ... made of them. By Ville's inequality an honest worker's evidence ever reaches c with probability at most 1 / c,
however long it works and however often one looks (Ville 1939; Ramdas et al., arXiv 2210.01948). So a ban at 1e5 hits an
honest worker with probability at most 1e-5 over its whole life.

Let s be one statistic of a token: its margin against the seed's choice, the error of its logprob, or the logarithm of a
likelihood ratio (verify.py). Some may be below 0. An honest token satisfies

    E[exp(lambda * min(s, cap)) | everything before] <= M0(lambda)

This is the only assumption. Calibration measures M0 on honest data of the same kinds of engine, dtype and hardware.
Each bundle then multiplies the evidence by

    e(lambda) = product over its tokens of exp(lambda * min(s, cap)) / M0(lambda)

A large lambda detects small changes best, a small one rare large errors, so evidence is a mixture over several. It is
also a mixture over the bundle at which a worker starts to cheat: with the plain product, a change would have to use up
a year of honest work before it is detected. Start t has the prior weight 1 / (t * (t + 1)), which sums to 1:

    A_t = (A_{t-1} + 1 / (t * (t + 1))) * e_t        M_t = A_t + 1 / (t + 1)

so detecting a worker that starts to cheat at bundle t takes log(t * (t + 1)) more nats, not a year's worth.

A validator sums each bundle's statistics under the run's calibration (calibration.py) and the coordinator folds the
sums. It bans a worker whose evidence reaches the run's `checks.evidence_max`. A bundle whose own evidence is large
enough is rejected too (calibration.py). The thresholds on single bundles (verify.py) remain, for gross errors.

Letters: T tokens, C completions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from prime_protocol.assignment import Count, Name
from prime_protocol.envelope import WireModel
from prime_protocol.limits import CALIBRATIONS_MAX, COMPARED_REWARDS_MAX, COUNT_MAX, LAMBDAS_MAX, STATISTICS_MAX

LOG_WEALTH_MAX = 1e6
"""Nats. Beyond every threshold, and far below the size at which sums of floats lose a nat."""

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Moments(WireModel):
    """Behaviour of honest tokens in one statistic.

    Example: Moments(cap=0.5, lambdas=(1.0, 10.0), log_moments=(0.001, 0.02), num_tokens=100_000).
    """

    cap: float = Field(gt=0.0, le=1e6)
    """Maximum of the statistic, in its own unit; a larger value counts as this."""
    lambdas: tuple[Annotated[float, Field(gt=0.0, le=1e6)], ...] = Field(min_length=1, max_length=LAMBDAS_MAX)
    """Exponents for which the moments were measured."""
    log_moments: tuple[Annotated[float, Field(ge=0.0, le=1e6)], ...] = Field(min_length=1, max_length=LAMBDAS_MAX)
    """log M0(lambda) for each lambda: an upper bound, since what is unknown must not count against any worker."""
    num_tokens: Count
    """Number of honest tokens that were measured."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.lambdas) != len(self.log_moments):
            raise ValueError("expected one moment for each lambda")
        return self


@dataclass(frozen=True, slots=True)
class Wealth:
    """Evidence of one statistic against one worker. The initial state is Wealth()."""

    num_bundles: int = 0
    log_wealth: tuple[float, ...] = ()
    """log A_t for each lambda; empty before the first bundle."""


class Sums(WireModel):
    """Contribution of a bundle's tokens to one statistic. Example: Sums(num_tokens=512, log_e=(-0.3, -1.2))."""

    num_tokens: Count
    """Number of values in the sum."""
    log_e: tuple[Finite, ...] = Field(max_length=LAMBDAS_MAX)
    """Nats, log e(lambda) for each lambda of the calibration."""


class ComparedRewards(WireModel):
    """Rewards of one group, without those that an environment could not give.

    Example: ComparedRewards(mine=(1.0, 0.0), trusted=(0.0,)).
    """

    mine: tuple[Finite, ...] = Field(max_length=COMPARED_REWARDS_MAX)
    """Rewards of the worker."""
    trusted: tuple[Finite, ...] = Field(max_length=COMPARED_REWARDS_MAX)
    """Rewards of the validator's own completions."""


class BundleEvidence(WireModel):
    """Evidence of a bundle against its worker, from a validator's forward pass."""

    worker: Name
    """Class of the engine that sampled, as the bundle's header claims it: `name/dtype/device`."""
    validator: Name
    """Class of the engine that judged."""
    sums: dict[Name, Sums] = Field(max_length=STATISTICS_MAX)
    """Sums by statistic. Empty: the run's calibration does not know this pair of classes."""
    calibration: int = Field(default=0, ge=0, le=CALIBRATIONS_MAX, exclude_if=lambda version: version == 0)
    """Version of the calibration that the sums are measured by: its newest amendment that the validator knew."""
    compared: tuple[ComparedRewards, ...] = Field(
        default=(), max_length=COMPARED_REWARDS_MAX, exclude_if=lambda groups: not groups
    )
    """Input of the reward ranks, by group; omitted if there are too many rewards to list, or none."""

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if sum(len(one.mine) + len(one.trusted) for one in self.compared) > COMPARED_REWARDS_MAX:
            raise ValueError(f"at most {COMPARED_REWARDS_MAX} compared rewards are allowed")
        return self


class Weighed(BundleEvidence):
    """Evidence of a bundle with its place in the worker's life, so that anyone with the receipts can add it up again."""

    number: int = Field(ge=1, le=COUNT_MAX)
    """Number of the bundle among those weighed since the worker began or was forgiven, from 1."""
    log_evidence: Finite
    """Nats of evidence after this bundle."""


def calibrate_statistics(
    honest: npt.NDArray[np.floating],
    *,
    cap: float,
    lambdas: Sequence[float],
    lengths: npt.NDArray[np.integer] | None = None,
    headroom: float = 1.0,
) -> Moments:
    """Compute moments of honest values [T], including an allowance for what a sample of that size cannot exclude.

    M0 = mean of exp(lambda * min(s, cap)) + 4 standard errors + 3 / T * exp(lambda * cap). The last term is the rule of
    three: it puts as many tokens as can have escaped the sample at the cap. Errors within a completion are correlated.
    If `lengths` [C] shows which tokens form one, M0 is also large enough that a completion's e-value has a mean of at
    most 1, plus 4 standard errors. `headroom` multiplies log M0, because a run's policies differ
    from the measured one. If some values are below 0 it multiplies what the others add to M0 instead, because log M0 may
    then be near 0 whatever the size of the errors.
    """
    values_T = np.minimum(honest.astype(np.float64), cap)
    assert len(values_T) > 1
    if values_T.min() < 0:
        found = [_signed_log_moment(values_T, cap, rate, lengths, headroom) for rate in lambdas]
        return Moments(cap=cap, lambdas=tuple(lambdas), log_moments=tuple(found), num_tokens=len(values_T))
    log_moments = []
    for rate in lambdas:
        powers_T = np.exp(rate * values_T)
        moment = _upper_mean(powers_T) + 3 / len(values_T) * math.exp(rate * cap)
        log_moment = math.log(moment)
        if lengths is not None:
            log_moment = max(log_moment, _log_moment_of_completions(rate * values_T, lengths, rate * cap))
        log_moments.append(headroom * log_moment)
    return Moments(cap=cap, lambdas=tuple(lambdas), log_moments=tuple(log_moments), num_tokens=len(values_T))


def _signed_log_moment(
    values_T: npt.NDArray[np.float64],
    cap: float,
    rate: float,
    lengths_C: npt.NDArray[np.integer] | None,
    headroom: float,
) -> float:
    gains_T = np.expm1(rate * values_T)
    powers_T = 1 + np.where(gains_T > 0, headroom * gains_T, gains_T)
    most = 1 + headroom * math.expm1(rate * cap)
    found = max(0.0, math.log(_upper_mean(powers_T) + 3 / len(values_T) * most))
    if lengths_C is None:
        return found
    exponents_T = rate * values_T  # not the logarithm of powers, which may be rounded to 0
    exponents_T[gains_T > 0] = np.log1p(headroom * gains_T[gains_T > 0])
    return max(found, _log_moment_of_completions(exponents_T, lengths_C, math.log(most)))


def _upper_mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean() + 4 * values.std() / math.sqrt(len(values)))


def _log_moment_of_completions(
    exponents_T: npt.NDArray[np.float64], lengths_C: npt.NDArray[np.integer], most: float
) -> float:
    """Find the smallest log M0 at which completions' e-values have a mean of at most 1, by bisecting [0, most]."""
    sums_C = np.add.reduceat(exponents_T, np.cumsum(lengths_C) - lengths_C)
    low, high = 0.0, most
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        is_enough = _upper_mean(np.exp(np.minimum(sums_C - lengths_C * middle, 700.0))) <= 1
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def sums_of(values: npt.NDArray[np.floating], moments: Moments) -> Sums:
    """Sum a bundle's values [T]. NaN counts as the cap; sums are rounded down, to 1e-6 nats."""
    values_T = np.minimum(np.nan_to_num(values.astype(np.float64), nan=moments.cap), moments.cap)
    total = float(values_T.sum())
    log_e = (
        math.floor((rate * total - len(values_T) * log_moment) * 1e6) / 1e6
        for rate, log_moment in zip(moments.lambdas, moments.log_moments, strict=True)
    )
    return Sums(num_tokens=len(values_T), log_e=tuple(log_e))


def updated(wealth: Wealth, sums: Sums) -> Wealth:
    """Return the evidence after one more bundle. A run's calibration is fixed, so the number of lambdas is too."""
    assert len(wealth.log_wealth) in (0, len(sums.log_e))
    bundle = wealth.num_bundles + 1
    prior = -math.log(bundle) - math.log(bundle + 1)
    before = wealth.log_wealth or (-math.inf,) * len(sums.log_e)
    after = (float(np.logaddexp(log_a, prior)) + log_e for log_a, log_e in zip(before, sums.log_e, strict=True))
    return Wealth(num_bundles=bundle, log_wealth=tuple(min(max(a, -LOG_WEALTH_MAX), LOG_WEALTH_MAX) for a in after))


def folded(evidence: Mapping[str, Wealth], sums: Mapping[str, Sums], *, statistics: Iterable[str]) -> dict[str, Wealth]:
    """Return a worker's evidence after one more bundle. `statistics` is all of the run's calibration; others are ignored.

    Statistics that a bundle lacks stay unchanged. The set is fixed, so the mean over it is an e-process.
    """
    known = {name: evidence.get(name, Wealth()) for name in statistics}
    return {name: updated(wealth, sums[name]) if name in sums else wealth for name, wealth in known.items()}


def log_evidence(wealth: Mapping[str, Wealth]) -> float:
    """Return nats of evidence in all statistics: the log of the mean of M_t over statistics and lambdas. 0 at the start.

    A mean of e-processes is an e-process, so using several statistics costs only the logarithm of their number.
    """
    if not wealth:
        return 0.0
    return log_mean([_log_of_one(one) for one in wealth.values()])


def _log_of_one(wealth: Wealth) -> float:
    unspent = -math.log(wealth.num_bundles + 1)
    return log_mean([float(np.logaddexp(log_a, unspent)) for log_a in wealth.log_wealth]) if wealth.log_wealth else 0.0


def log_mean(logs: Sequence[float]) -> float:
    """Return the logarithm of the mean of e-values, given their logarithms. At least one is needed."""
    return float(np.logaddexp.reduce(np.array(logs))) - math.log(len(logs))
