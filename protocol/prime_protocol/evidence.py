"""Evidence against a worker: e-values that add up over its life and may be looked at after every bundle.

An e-value is a non-negative statistic whose mean is at most 1 for an honest worker. Evidence is a process M_0 = 1, M_1, M_2, ...
made of them such that, by Ville's inequality, an honest worker's evidence ever reaches c with probability at most 1 / c, however
long it works and however often one looks (Ville 1939; Ramdas et al., arXiv 2210.01948). A ban at 1e5 therefore hurts an honest
worker with probability at most 1e-5 over its whole life.

Of one statistic s of a token (the margin by which it is not the seed's choice, the error of its logprob, or the logarithm of a
likelihood ratio, the only kind that may be below 0: verify.py), an honest token satisfies
E[exp(lambda * min(s, cap)) | everything before] <= M0(lambda). That is what calibration measures, on honest data of the same
kinds of engine, dtype and hardware, and it is the one assumption. Then each bundle multiplies the evidence by

    e(lambda) = product over its tokens of exp(lambda * min(s, cap)) / M0(lambda)

Small changes are seen best at a large lambda, rare large errors at a small one, so evidence is a mixture over several. It is also
a mixture over the bundle from which on a worker cheats: with the plain product, a year of honest work would have to be used up
before a change is seen. Start t has the prior weight 1 / (t * (t + 1)), which sums to 1:

    A_t = (A_{t-1} + 1 / (t * (t + 1))) * e_t        M_t = A_t + 1 / (t + 1)

so against somebody who begins to cheat at bundle t it takes log(t * (t + 1)) nats more, not a year's worth.

A validator sums each bundle's statistics under the run's calibration (calibration.py), the coordinator folds the sums, and a
worker whose evidence reaches the run's `checks.evidence_max` is banned. The thresholds on single bundles (verify.py) stay beside
it, for what is grossly wrong.

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
from prime_protocol.limits import COMPARED_REWARDS_MAX, COUNT_MAX, LAMBDAS_MAX, STATISTICS_MAX

LOG_WEALTH_MAX = 1e6
"""Nats. Beyond every threshold, and far from where sums of floats lose a nat."""

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Moments(WireModel):
    """What honest tokens do in one statistic.

    Example: Moments(cap=0.5, lambdas=(1.0, 10.0), log_moments=(0.001, 0.02), num_tokens=100_000).
    """

    cap: float = Field(gt=0.0, le=1e6)
    """In the statistic's own unit; a larger value counts as this."""
    lambdas: tuple[Annotated[float, Field(gt=0.0, le=1e6)], ...] = Field(min_length=1, max_length=LAMBDAS_MAX)
    log_moments: tuple[Annotated[float, Field(ge=0.0, le=1e6)], ...] = Field(min_length=1, max_length=LAMBDAS_MAX)
    """log M0(lambda), one for each lambda: an upper bound, since what is not known must not count against anybody."""
    num_tokens: Count
    """How many honest tokens it was measured on."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(self.lambdas) != len(self.log_moments):
            raise ValueError("there is one moment for each lambda")
        return self


@dataclass(frozen=True, slots=True)
class Wealth:
    """The evidence of one statistic against one worker. Begins as Wealth()."""

    num_bundles: int = 0
    log_wealth: tuple[float, ...] = ()
    """log A_t for each lambda; empty before the first bundle."""


class Sums(WireModel):
    """What a bundle's tokens say in one statistic. Example: Sums(num_tokens=512, log_e=(-0.3, -1.2))."""

    num_tokens: Count
    """How many values were summed."""
    log_e: tuple[Finite, ...] = Field(max_length=LAMBDAS_MAX)
    """Nats, log e(lambda) for each lambda of the calibration."""


class ComparedRewards(WireModel):
    """Of one group, but for what an environment could not give. Example: ComparedRewards(mine=(1.0, 0.0), trusted=(0.0,))."""

    mine: tuple[Finite, ...] = Field(max_length=COMPARED_REWARDS_MAX)
    """The worker's."""
    trusted: tuple[Finite, ...] = Field(max_length=COMPARED_REWARDS_MAX)
    """Those of the validator's own completions."""


class BundleEvidence(WireModel):
    """What a bundle says against its worker, by a validator's forward pass."""

    worker: Name
    """Class of the engine that sampled, as the bundle's header claims it: `name/dtype/device`."""
    validator: Name
    """Class of the engine that judged."""
    sums: dict[Name, Sums] = Field(max_length=STATISTICS_MAX)
    """By statistic. Empty: the run's calibration does not know these two classes together."""
    compared: tuple[ComparedRewards, ...] = Field(
        default=(), max_length=COMPARED_REWARDS_MAX, exclude_if=lambda groups: not groups
    )
    """What the reward ranks are made of, by group; left out where there are too many rewards to tell, or none."""

    @model_validator(mode="after")
    def _is_bounded(self) -> Self:
        if sum(len(one.mine) + len(one.trusted) for one in self.compared) > COMPARED_REWARDS_MAX:
            raise ValueError(f"at most {COMPARED_REWARDS_MAX} compared rewards are told")
        return self


class Weighed(BundleEvidence):
    """The same with its place in the worker's life, so that whoever holds the receipts can add them up again."""

    number: int = Field(ge=1, le=COUNT_MAX)
    """1 for the first bundle that was weighed since the worker began or was forgiven, then one more each time."""
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
    """Moments of honest values [T], with what a sample of that size cannot exclude added.

    M0 = mean of exp(lambda * min(s, cap)) + 4 standard errors + 3 / T * exp(lambda * cap): the last term is the rule of three,
    as if as many tokens as can have escaped the sample lay at the cap. Errors of one completion go together; where `lengths`
    [C] says which tokens are one, M0 is also so large that a completion's e-value has a mean of at most 1, plus 4 standard
    errors. `headroom` multiplies log M0: the policies of a run are not the one that was measured.
    """
    values_T = np.minimum(honest.astype(np.float64), cap)
    assert len(values_T) > 1
    assert values_T.min() >= 0
    log_moments = []
    for rate in lambdas:
        powers_T = np.exp(rate * values_T)
        moment = _upper_mean(powers_T) + 3 / len(values_T) * math.exp(rate * cap)
        log_moment = math.log(moment)
        if lengths is not None:
            log_moment = max(log_moment, _log_moment_of_completions(rate * values_T, lengths, rate * cap))
        log_moments.append(headroom * log_moment)
    return Moments(cap=cap, lambdas=tuple(lambdas), log_moments=tuple(log_moments), num_tokens=len(values_T))


def _upper_mean(values: npt.NDArray[np.float64]) -> float:
    return float(values.mean() + 4 * values.std() / math.sqrt(len(values)))


def _log_moment_of_completions(
    exponents_T: npt.NDArray[np.float64], lengths_C: npt.NDArray[np.integer], most: float
) -> float:
    """The smallest log M0, by halving [0, most], at which completions' e-values have a mean of at most 1."""
    sums_C = np.add.reduceat(exponents_T, np.cumsum(lengths_C) - lengths_C)
    low, high = 0.0, most
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        is_enough = _upper_mean(np.exp(np.minimum(sums_C - lengths_C * middle, 700.0))) <= 1
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def sums_of(values: npt.NDArray[np.floating], moments: Moments) -> Sums:
    """What a bundle's values [T] say. A value that is not a number counts as the cap; sums are rounded down, to 1e-6 nats."""
    values_T = np.minimum(np.nan_to_num(values.astype(np.float64), nan=moments.cap), moments.cap)
    total = float(values_T.sum())
    log_e = (
        math.floor((rate * total - len(values_T) * log_moment) * 1e6) / 1e6
        for rate, log_moment in zip(moments.lambdas, moments.log_moments, strict=True)
    )
    return Sums(num_tokens=len(values_T), log_e=tuple(log_e))


def updated(wealth: Wealth, sums: Sums) -> Wealth:
    """After one more bundle. A run's calibration is fixed, so the number of lambdas is too."""
    assert len(wealth.log_wealth) in (0, len(sums.log_e))
    bundle = wealth.num_bundles + 1
    prior = -math.log(bundle) - math.log(bundle + 1)
    before = wealth.log_wealth or (-math.inf,) * len(sums.log_e)
    after = (float(np.logaddexp(log_a, prior)) + log_e for log_a, log_e in zip(before, sums.log_e, strict=True))
    return Wealth(num_bundles=bundle, log_wealth=tuple(min(max(a, -LOG_WEALTH_MAX), LOG_WEALTH_MAX) for a in after))


def folded(evidence: Mapping[str, Wealth], sums: Mapping[str, Sums], *, statistics: Iterable[str]) -> dict[str, Wealth]:
    """A worker's evidence after one more bundle. `statistics`: all of the run's calibration; others are ignored.

    Statistics that a bundle does not have stay as they are. The set is fixed, so that the mean over it is an e-process.
    """
    known = {name: evidence.get(name, Wealth()) for name in statistics}
    return {name: updated(wealth, sums[name]) if name in sums else wealth for name, wealth in known.items()}


def log_evidence(wealth: Mapping[str, Wealth]) -> float:
    """Nats of evidence in all statistics together: the log of the mean over statistics and lambdas of M_t. 0 to begin with.

    A mean of such processes is one again, so looking at several statistics costs their number's logarithm and nothing else.
    """
    if not wealth:
        return 0.0
    return _log_mean([_log_of_one(one) for one in wealth.values()])


def _log_of_one(wealth: Wealth) -> float:
    unspent = -math.log(wealth.num_bundles + 1)
    return _log_mean([float(np.logaddexp(log_a, unspent)) for log_a in wealth.log_wealth]) if wealth.log_wealth else 0.0


def _log_mean(logs: Sequence[float]) -> float:
    return float(np.logaddexp.reduce(np.array(logs))) - math.log(len(logs))
