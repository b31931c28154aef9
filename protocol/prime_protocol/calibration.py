"""Calibration: how large a bundle's statistics may be before they count as evidence, measured on honest engines.

Two engines that compute the same policy differ in the last bits. The difference depends on the sampling and
on the judging engine. So there are moments for each pair of engine classes, `name/dtype/device`. `prime-node
calibrate` measures them. The RunSpec contains the calibration: the basis of possible bans is signed and pinned before
any worker joins.

Invariant: a statistic has the same number of lambdas in every pair, because a worker's evidence continues under another
validator.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from prime_protocol.assignment import Count, Name, Text
from prime_protocol.close_flips import CLOSE_FLIPS
from prime_protocol.envelope import WireModel
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import BundleEvidence, Moments, log_mean, sums_of
from prime_protocol.excess_flips import EXCESS_FLIPS
from prime_protocol.limits import CALIBRATION_PAIRS_MAX, STATISTICS_MAX
from prime_protocol.reward_ranks import REWARD_RANKS, rank_sums
from prime_protocol.shading import SHADING, SHADING_BY_REWARD

NEED_NONE = frozenset({CLOSE_FLIPS, EXCESS_FLIPS, SHADING, SHADING_BY_REWARD, *REWARD_RANKS})
"""Statistics that hold for any engine."""
BUNDLES_OF_A_LIFE = 10_000
"""Audited bundles of an honest worker among which, with a probability of 1 - 1 / evidence_max, none is rejected by its own
evidence."""
NATS_ERROR_MAX = 1e-3
"""Tolerance in nats: logarithms may differ in the last bits between machines."""


class PairMoments(WireModel):
    """Behaviour of one engine's honest tokens under another engine's forward pass."""

    worker: Name
    """Class of the engine that samples."""
    validator: Name
    """Class of the engine that judges."""
    moments: dict[Name, Moments] = Field(min_length=1, max_length=STATISTICS_MAX)
    """Moments by statistic."""


class Calibration(WireModel):
    """Part of the RunSpec's checks. Example: Calibration(pairs=(PairMoments(worker="transformers/fp32/cpu", ...),))."""

    pairs: tuple[PairMoments, ...] = Field(min_length=1, max_length=CALIBRATION_PAIRS_MAX)
    """Measurements, one for each pair of a worker's and a validator's engine."""
    hidden_size_max: Count = 0
    """Hidden size of the measured model."""
    num_layers_max: Count = 0
    """Number of layers of the measured model. A larger model makes larger errors and needs its own calibration."""
    temperature_min: float = Field(default=0.0, ge=0.0, le=10.0, exclude_if=lambda value: value == 0.0)
    """Sampling temperature of the measurement. A lower one makes larger errors. 0: its slack covers lower ones."""
    note: Text = ""
    """Note on how and where it was measured."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        classes = [(pair.worker, pair.validator) for pair in self.pairs]
        if len(set(classes)) != len(classes):
            raise ValueError("each pair of engine classes must occur once")
        for name in self.statistics:
            if len({len(pair.moments[name].lambdas) for pair in self.pairs if name in pair.moments}) > 1:
                raise ValueError(f"statistic {name} has different numbers of lambdas in two pairs")
        return self

    @property
    def statistics(self) -> tuple[str, ...]:
        """All statistics of all pairs."""
        return tuple(sorted({name for pair in self.pairs for name in pair.moments}))

    def without(self, statistics: Collection[str]) -> Calibration:
        """Return a copy for runs without these statistics. Each additional one slightly weakens the detection by the others."""
        kept = (
            {name: moments for name, moments in pair.moments.items() if name not in statistics} for pair in self.pairs
        )
        pairs = tuple(
            pair.model_copy(update={"moments": moments})
            for pair, moments in zip(self.pairs, kept, strict=True)
            if moments
        )
        return self.model_copy(update={"pairs": pairs})

    def moments_of(self, *, worker: str, validator: str) -> dict[str, Moments]:
        """Return the moments for a pair of classes; empty if the pair is unknown."""
        found = (pair.moments for pair in self.pairs if (pair.worker, pair.validator) == (worker, validator))
        return next(found, {})


def is_calibrated(evidence: BundleEvidence) -> bool:
    """Return whether the calibration knows the bundle's two engines."""
    return not NEED_NONE.issuperset(evidence.sums)


def shown_alone(evidence: BundleEvidence, *, evidence_max: float) -> str | None:
    """Return the statistic that shows most, if the bundle alone is enough evidence to reject it, else None.

    The e-value of the bundle is the mean over its statistics and their lambdas. An honest worker's reaches the limit with
    a probability of at most 1 / (BUNDLES_OF_A_LIFE * evidence_max).
    """
    logs = {name: log_mean(sums.log_e) for name, sums in evidence.sums.items() if sums.log_e}
    if not logs or log_mean(list(logs.values())) < math.log(BUNDLES_OF_A_LIFE * evidence_max):
        return None
    return max(logs, key=logs.__getitem__)


def evidence_of(
    found: Mapping[str, npt.NDArray[np.floating]], calibration: Calibration, *, worker: str, validator: str
) -> BundleEvidence:
    """Sum a bundle's statistics under the calibration of its two engines. Statistics without moments are left out."""
    known = calibration.moments_of(worker=worker, validator=validator)
    sums = {name: sums_of(values, known[name]) for name, values in found.items() if name in known and len(values)}
    return BundleEvidence(worker=worker, validator=validator, sums=sums)


def require_possible(evidence: BundleEvidence, known: Mapping[str, Moments]) -> None:
    """Check that the sums are possible under the run's moments for the two engines. Raises RemoteError(MALFORMED).

    No token adds more than the cap, and the reward ranks match the compared rewards, if these are listed.
    """
    for name, sums in evidence.sums.items():
        moments = known.get(name)
        if moments is None or len(moments.lambdas) != len(sums.log_e):
            detail = f"no {name} of {evidence.worker} under {evidence.validator} in the run's calibration"
            raise RemoteError(ErrorCode.MALFORMED, detail)
        for rate, log_moment, log_e in zip(moments.lambdas, moments.log_moments, sums.log_e, strict=True):
            if log_e > sums.num_tokens * (rate * moments.cap - log_moment) + NATS_ERROR_MAX:
                raise RemoteError(
                    ErrorCode.MALFORMED, f"{name} of a bundle is above the maximum for its number of tokens"
                )
    if evidence.compared:
        _require_ranks(evidence)


def _require_ranks(evidence: BundleEvidence) -> None:
    claimed = {name: sums for name, sums in evidence.sums.items() if name in REWARD_RANKS}
    found = rank_sums([(one.mine, one.trusted) for one in evidence.compared])
    if claimed.keys() == found.keys() and all(
        sums.num_tokens == found[name].num_tokens
        and all(abs(a - b) <= NATS_ERROR_MAX for a, b in zip(sums.log_e, found[name].log_e, strict=True))
        for name, sums in claimed.items()
    ):
        return
    raise RemoteError(ErrorCode.MALFORMED, "the reward ranks do not match the compared rewards")
