"""What a run audits and the thresholds at which its validators reject: two parts of the RunSpec."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from prime_protocol import close_flips, excess_flips, limits, reward_ranks, shading
from prime_protocol.calibration import Calibration
from prime_protocol.close_flips import CLOSE_FLIPS
from prime_protocol.envelope import WireModel
from prime_protocol.evidence import Moments
from prime_protocol.excess_flips import EXCESS_FLIPS
from prime_protocol.reward_ranks import REWARD_RANKS
from prime_protocol.shading import SHADING, SHADING_BY_REWARD

EVIDENCE_MAX = 1e5
"""Inverse of the probability that statistics ever ban an honest worker: at most 1 / EVIDENCE_MAX over its whole life."""


class AuditPolicy(WireModel):
    """Rules for which bundles get a forward pass: all of a newcomer's, later a share that falls as the worker passes audits."""

    share_min: float = Field(default=0.25, gt=0.0, le=1.0)
    """Minimum share of any worker's bundles that is audited, chosen by a secret after the upload."""
    newcomer_bundles: int = Field(default=16, ge=1, le=limits.COUNT_MAX)
    """N: after n passed audits in a row the share is N / n, and 1 before."""
    escrow_bundles: int = Field(default=8, ge=0, le=limits.ESCROW_BUNDLES_MAX)
    """D: bundles in escrow. The tokens of a worker's last D accepted bundles are not credited yet; it loses them when
    the first dishonest bundle is found."""

    @model_validator(mode="after")
    def _cheating_does_not_pay(self) -> Self:
        if self.share_min * (1 + self.escrow_bundles) < 1.0:
            raise ValueError(
                "share_min * (1 + escrow_bundles) must be at least 1: a cheat must stake more than it saves"
            )
        return self


ALL_AUDITED = AuditPolicy(share_min=1.0, escrow_bundles=0)
"""Audit policy of a RunSpec without one."""


class CheckPolicy(WireModel):
    """Thresholds at which a validator rejects a bundle. The defaults are for fp32 arithmetic on bf16 weights.

    They bound gross errors. Below that, the first three and `stop_margin_max` only reject bundles of engines without a
    calibration, and without a strike (verify.verdict_on).
    """

    logprob_error_mean_max: float = Field(default=0.01, gt=0.0)
    """Nats. Mean over the bundle's tokens of |claimed - recomputed|; honest is below 6e-4 (fp32), and 0.03 to 0.04 for
    bf16 of a model of 135 M parameters."""
    logprob_error_max: float = Field(default=0.5, gt=0.0)
    """Nats. For any single token; the largest honest one seen is 0.01 (fp32) to 0.7 (bf16)."""
    seed_flips_share_max: float = Field(default=0.03, ge=0.0, le=1.0)
    """Share of tokens that the assigned seed does not choose; honest is below 0.03."""
    seed_margin_max: float = Field(default=2.0, gt=0.0, exclude_if=lambda value: value == 2.0)
    """Nats by which any token's score may be below that of the seed's choice; the largest honest one seen is 0.45."""
    stop_margin_max: float = Field(default=0.5, gt=0.0, exclude_if=lambda value: value == 0.5)
    """Nats. The same margin if a completion ends with a stop token that the seed does not choose, or continues where it
    chooses one."""
    unseeded: bool = Field(default=False, exclude_if=lambda unseeded: not unseeded)
    """Whether engines with their own randomness may take part. Checks can prove less about their bundles."""
    choice_deviation_max: float = Field(default=6.0, gt=0.0, exclude_if=lambda value: value == 6.0)
    """Standard deviations, for unseeded bundles: the limit on the distance of the chosen tokens' total logprob from its mean."""
    reference_share: float = Field(default=0.0, ge=0.0, le=1.0, exclude_if=lambda value: value == 0.0)
    """Share of unseeded groups, chosen after the upload, that the validator also samples to compare the rewards
    (reward_ranks.py). No other check detects a worker that samples several times and uploads the best. The generation
    cost grows by this share."""
    references_public: bool = Field(default=False, exclude_if=lambda is_public: not is_public)
    """Whether a receipt lists the compared rewards, so that anyone can repeat the comparison."""
    flips_explained: bool = Field(default=False, exclude_if=lambda explained: not explained)
    """Whether flips beyond those that the claimed logprobs explain count as evidence (excess_flips.py)."""
    close_flips_seen: bool = Field(default=False, exclude_if=lambda seen: not seen)
    """Whether flips where claimed and recomputed logprobs agree closely count as stronger evidence (close_flips.py)."""
    shading_seen: bool = Field(default=False, exclude_if=lambda seen: not seen)
    """Whether claimed logprobs that are too low or too high, overall or by reward, count as evidence (shading.py)."""
    logprobs_judged: bool = Field(default=False, exclude_if=lambda judged: not judged)
    """Whether validators send the logprobs of the completions that they audit, and the trainer uses those."""
    proofs: bool = Field(default=False, exclude_if=lambda proofs: not proofs)
    """Whether bundles carry hidden-state proofs."""
    proof_error_mean_max: float = Field(default=6.0, gt=0.0, exclude_if=lambda value: value == 6.0)
    """Steps of bf16. Mean distance over the bundle's proofs (section 10); honest is 0 (fp32) to 2 (bf16), the maximum is 16."""
    proof_error_max: float = Field(default=13.0, gt=0.0, exclude_if=lambda value: value == 13.0)
    """Steps of bf16, for any single proof."""
    strikes_max: int = Field(default=2, ge=1, le=limits.COUNT_MAX)
    """Rejected bundles that only dishonesty or a broken machine explains, at which a worker is banned."""
    audits: AuditPolicy | None = Field(default=None, exclude_if=lambda value: value is None)
    """Rules for which bundles are audited. None: all are."""
    calibration: Calibration | None = Field(default=None, exclude_if=lambda value: value is None)
    """Measured behaviour of honest tokens, by engine. None: only gross errors are strikes, and of evidence only what needs no
    calibration accumulates."""
    evidence_max: float = Field(default=EVIDENCE_MAX, ge=10.0, le=1e100, exclude_if=lambda value: value == EVIDENCE_MAX)
    """Evidence (evidence.py) at which a worker is banned; an honest one with a probability of at most 1 / evidence_max."""

    @model_validator(mode="after")
    def _evidence_fits(self) -> Self:
        if len(self.statistics) > limits.STATISTICS_MAX:
            raise ValueError(f"evidence has at most {limits.STATISTICS_MAX} statistics, including uncalibrated ones")
        return self

    @property
    def compares_rewards(self) -> bool:
        """Whether unseeded rewards are compared with trusted ones."""
        return self.unseeded and self.reference_share > 0.0

    @property
    def statistics(self) -> tuple[str, ...]:
        """All statistics that evidence may use, always the same set; empty if evidence does not accumulate."""
        calibrated = () if self.calibration is None else self.calibration.statistics
        return (*calibrated, *self._uncalibrated)

    @property
    def validator_classes(self) -> frozenset[str]:
        """Classes of validators' engines that the calibration knows."""
        return frozenset() if self.calibration is None else frozenset(pair.validator for pair in self.calibration.pairs)

    @property
    def worker_classes(self) -> frozenset[str]:
        """Classes of workers' engines that the calibration knows."""
        return frozenset() if self.calibration is None else frozenset(pair.worker for pair in self.calibration.pairs)

    def moments_of(self, *, worker: str, validator: str) -> dict[str, Moments]:
        """Return the moments of each statistic that a bundle between engines of these classes may have."""
        known = {} if self.calibration is None else self.calibration.moments_of(worker=worker, validator=validator)
        return known | self._uncalibrated

    @property
    def _uncalibrated(self) -> dict[str, Moments]:
        """Moments of the statistics that hold for any engine."""
        found = {EXCESS_FLIPS: excess_flips.MOMENTS} if self.flips_explained else {}
        if self.compares_rewards:
            found |= dict.fromkeys(REWARD_RANKS, reward_ranks.MOMENTS)
        if self.shading_seen:
            found |= {SHADING: shading.MOMENTS, SHADING_BY_REWARD: shading.MOMENTS_BY_REWARD}
        if self.close_flips_seen:
            found |= {CLOSE_FLIPS: close_flips.MOMENTS}
        return found
