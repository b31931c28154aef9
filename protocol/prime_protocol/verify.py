"""Checks on a bundle of rollouts. They are numbered, cheap ones first; the first that fails gives the reason.

    (1) the policy is the lease's, spans as allowed       WRONG_POLICY
    (2) number and length of turns are allowed            WRONG_CONTEXT
        lease, groups, order, seeds are the assigned ones WRONG_ASSIGNMENT
    (3) token ids are within the vocabulary               TOKEN_OUT_OF_RANGE
    (4) each completion ends where it must                BAD_TERMINATION
    (5) claimed logprobs are the policy's                 LOGPROB_MISMATCH
    (6) tokens are the ones that the seeds choose         SEED_MISMATCH, at a completion's end BAD_TERMINATION
    (7) hidden states are those that it commits to        PROOF_MISMATCH

For engines with their own randomness, if the run admits them, (6) checks instead that the tokens are plausible samples,
neither too probable nor too improbable in total: IMPLAUSIBLE.

(1) to (4) need only the lease. (5) to (7) need a trusted forward pass of the claimed policy over prompt and completion;
they take its results as arrays. step.check judges steps and envelope.py judges envelopes before any of these checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_protocol.assignment import Lease, Sampling
from prime_protocol.calibration import is_calibrated, shown_alone
from prime_protocol.check_policy import CheckPolicy
from prime_protocol.close_flips import CLOSE_FLIPS
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.evidence import BundleEvidence
from prime_protocol.excess_flips import EXCESS_FLIPS, apart
from prime_protocol.proof import Bits, compare_proofs
from prime_protocol.rollout import FinishReason, RolloutHeader, Rollouts
from prime_protocol.run_spec import RunSpec
from prime_protocol.shading import rises
from prime_protocol.turns import has_assigned_seeds, prompt_fault, size_fault
from prime_protocol.verdict import RejectReason, Verdict

SHARPER, FLATTER = 0.8, 1.25
"""Temperatures, relative to the run's, that unseeded choices are compared with."""
COOLER = 0.95
"""Temperature, relative to the run's, that seeded choices are compared with."""
LOOSE = (0.06, 0.12)
"""Nats. Scales of the errors of scores that seeded choices are compared with: as in bf16, and twice as large."""
OUTSIDE_MIN = -1.0
"""Nats. Lower bound of top-p slack, so that no implementation has to sort the tail of the vocabulary."""
LIKELIHOOD_RATIOS = ("sharper", "flatter")
"""Statistics that may be below 0: their exponential has mean 1 if the worker samples from the policy."""
RATIO_NATS_MIN = -60.0
"""Lower bound of statistics that may be below 0."""
OF_SEEDS = frozenset({"margin", "flip", "stop", "cooler", "looser"})
"""Statistics that are meaningful only if the seeds decide."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Results of a trusted forward pass for a bundle's T completion tokens, in the bundle's order."""

    logprobs_T: npt.NDArray[np.float32]  # [T] nats, at the run's temperature
    margins_T: npt.NDArray[np.float32]
    """[T] best noisy score minus the chosen token's: 0 if the seed chooses this token, else above 0."""
    hidden_TD: Bits | None = None
    """[T, D] bf16: the last hidden state that each token was sampled from. None if not requested."""
    stop_margins_T: npt.NDArray[np.float32] | None = None
    """[T] for a stop token its margin; for another token, the lead of the best stop token over it, or 0."""
    expected_T: npt.NDArray[np.float32] | None = None
    """[T] mean logprob over the possible choices, without seeds. Margins then come from the filters alone."""
    variance_T: npt.NDArray[np.float32] | None = None
    """[T] variance of the logprob over the possible choices."""
    sharper_T: npt.NDArray[np.float32] | None = None
    """[T] without seeds and filters: nats by which the token would be likelier at SHARPER times the temperature."""
    flatter_T: npt.NDArray[np.float32] | None = None
    """[T] the same at FLATTER times the temperature."""
    spread_T: npt.NDArray[np.float32] | None = None
    """[T] by how much independent errors of the logits, alike for all tokens of the vocabulary, change the logprob: with p the
    chosen token's probability, sqrt((1 - p)^2 + sum of the others' p^2)."""
    cooler_T: npt.NDArray[np.float32] | None = None
    """[T] with seeds, above temperature 0 and without filters: the margin less that at COOLER times the temperature."""
    looser_T: npt.NDArray[np.float32] | None = None
    """[T] where `cooler_T` is: nats by which larger errors of the scores would make the choice likelier."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays that are present, by field name; the first dimension of each is T."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: array for name, array in named.items() if array is not None}

    def non_finite(self) -> list[str]:
        """Return the names of the arrays that hold a value that is not finite: the machine computes wrongly."""
        exponent = np.uint16(0x7F80)  # of bf16
        return [
            name
            for name, array in self.arrays().items()
            if not ((array & exponent) != exponent if name == "hidden_TD" else np.isfinite(array)).all()
        ]

    def split(self, lengths: Sequence[int]) -> list[Prefill]:
        """Split into the results of bundles with these numbers of tokens, which sum to T."""
        ends = np.cumsum(lengths)
        assert ends[-1] == len(self.logprobs_T)
        columns = {name: np.split(array, ends[:-1]) for name, array in self.arrays().items()}
        return [Prefill(**{name: parts[i] for name, parts in columns.items()}) for i in range(len(lengths))]


SPREAD_MIN = 0.01
"""Added to a token's spread in quadrature, so that almost certain tokens do not decide."""
DEVIATION_VARIANCE_MIN = 1.0
"""Nats squared. Lower bound of the variance, so that the little chance in almost certain tokens does not decide."""

Statistics = Mapping[str, npt.NDArray[np.float32]]
"""Statistics of each token of a bundle as evidence against its worker, by name. They are at least 0, and 0 if claim and
forward pass agree, except for `rise`, `cooler`, `looser` and LIKELIHOOD_RATIOS."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured values behind a verdict."""

    logprob_error_mean: float
    logprob_error_max: float
    seed_flips_share: float
    proof_error_mean: float = 0.0
    proof_error_max: float = 0.0
    seed_margin_max: float = 0.0
    stop_margin_max: float = 0.0
    choice_deviation: float = 0.0
    """Deviation of an unseeded bundle in standard deviations."""


def require_proofs(rollouts: Rollouts, policy: CheckPolicy) -> None:
    """Check that hidden-state proofs are present exactly if the run asks for them. parse_body has checked their number.

    Raises RemoteError(MALFORMED).
    """
    if policy.proofs != (rollouts.proofs_CB is not None):
        raise RemoteError(ErrorCode.MALFORMED, f"the run asks for {'' if policy.proofs else 'no '}hidden-state proofs")


def require_seeded(header: RolloutHeader, policy: CheckPolicy) -> None:
    """Raise RemoteError(MALFORMED) if a bundle declares an unseeded engine and the run admits none."""
    if not (header.engine.seeded or policy.unseeded):
        raise RemoteError(ErrorCode.MALFORMED, "the run does not accept unseeded engines")


def check_assignment(
    header: RolloutHeader,
    rollouts: Rollouts,
    lease: Lease,
    *,
    vocab_size: int,
    newest_policy: int | None = None,
    turns: RunSpec | None = None,
) -> Verdict:
    """Run checks (1) to (4).

    `newest_policy` is the newest that a token may come from, if the run lets completions span policies. `turns` is the
    run whose environments limit the number of turns; without it each rollout has one.
    """
    same_policy = header.policy_version == lease.policy_version and header.policy_digest == lease.policy_digest
    if not same_policy:  # (1)
        return Verdict.refuse(RejectReason.WRONG_POLICY, f"the lease asks for policy {lease.policy_version}")
    newest = lease.policy_version if newest_policy is None else newest_policy
    if not spans_ascend(rollouts, oldest=lease.policy_version, newest=newest):
        detail = f"the policies of spans must increase, from {lease.policy_version} to at most {newest}"
        return Verdict.refuse(RejectReason.WRONG_POLICY, detail)
    same_lease = (header.run, header.worker, header.lease_id, header.step) == (
        lease.run,
        lease.worker,
        lease.lease_id,
        lease.step,
    )
    fault = size_fault(rollouts, lease, turns) if same_lease else None  # (2), before any work per turn
    if fault is not None:
        return Verdict.refuse(RejectReason.WRONG_CONTEXT, fault)
    if not same_lease or not has_assigned_seeds(rollouts, lease):
        return Verdict.refuse(RejectReason.WRONG_ASSIGNMENT, "lease, groups, order or seeds are not the assigned ones")
    fault = prompt_fault(rollouts, lease, turns)
    if fault is not None:
        return Verdict.refuse(RejectReason.WRONG_CONTEXT, fault)
    if int(rollouts.token_ids_T.max()) >= vocab_size:  # (3)
        return Verdict.refuse(RejectReason.TOKEN_OUT_OF_RANGE, f"token ids must be below {vocab_size}")
    fault = termination_fault(rollouts, lease.sampling)
    if fault is not None:  # (4)
        return Verdict.refuse(RejectReason.BAD_TERMINATION, fault)
    return Verdict.accept()


def statistics(rollouts: Rollouts, prefill: Prefill) -> Statistics:
    """Compare claims with a trusted forward pass. NaN counts against the bundle, as infinity.

    - margin [T]: lead of another token's noisy score over the chosen one's
    - flip [T]: 1 if another token's score is higher at all, so that choices among near-ties have a budget too
    - logprob [T]: nats between the claimed logprob and the recomputed one
    - norm [T]: the same over the spread that errors of the logits have at this token, if `prefill` has it
    - square [T]: the square of norm
    - cooler, looser [T]: what would explain the choice better (SPEC.md, section 11), if `prefill` has them; may be below 0
    - apart [T]: |1 - p / p'| of their probabilities, the only thing that explains a flip (excess_flips.py)
    - rise [T]: p / p' - 1, with its sign (shading.py)
    - stop [T]: margin of a stop token, or the lead of the best one over the chosen token, if `prefill` has it
    - surprise, certainty, spread [T]: without seeds, how far the logprob is below or above its mean, and its variance
    - sharper, flatter [T]: without seeds, nats by which the token would be likelier at another temperature; may be below 0
    - proof [C]: mean distance of each hidden-state proof, if the bundle carries them and `prefill` has hidden states
    """
    assert rollouts.logprobs_T.shape == prefill.logprobs_T.shape == prefill.margins_T.shape
    errors_T = np.abs(rollouts.logprobs_T.astype(np.float64) - prefill.logprobs_T.astype(np.float64))
    flips_T = (~(prefill.margins_T <= 0)).astype(np.float32)
    found = {"margin": prefill.margins_T, "flip": flips_T, "logprob": errors_T.astype(np.float32)}
    found["apart"] = apart(rollouts.logprobs_T, prefill.logprobs_T).astype(np.float32)
    if prefill.spread_T is not None:
        found["norm"] = normed(found["logprob"], prefill.spread_T)
        found["square"] = np.square(found["norm"])
    if rollouts.proofs_CB is not None and prefill.hidden_TD is not None:
        errors = compare_proofs(rollouts.proofs_CB, prefill.hidden_TD, rollouts.lengths_N.tolist())
        found["proof"] = errors.distance_mean_C.astype(np.float32)
    if prefill.stop_margins_T is not None:
        found["stop"] = prefill.stop_margins_T
    if prefill.expected_T is not None and prefill.variance_T is not None:
        below_T = prefill.expected_T - prefill.logprobs_T
        found |= {"surprise": below_T, "certainty": -below_T, "spread": prefill.variance_T}
    found = {name: np.maximum(np.nan_to_num(values, nan=np.inf, posinf=np.inf), 0) for name, values in found.items()}
    found["rise"] = rises(rollouts.logprobs_T, prefill.logprobs_T).astype(np.float32)
    signed = {"cooler": prefill.cooler_T, "looser": prefill.looser_T}
    signed |= zip(LIKELIHOOD_RATIOS, (prefill.sharper_T, prefill.flatter_T), strict=True)
    return found | {name: _floored(values_T) for name, values_T in signed.items() if values_T is not None}


def _floored(values_T: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.maximum(np.nan_to_num(values_T, nan=np.inf, posinf=np.inf, neginf=RATIO_NATS_MIN), RATIO_NATS_MIN)


def normed(errors_T: npt.NDArray[np.float32], spread_T: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Divide errors of logprobs [T] by the spreads [T] of Prefill."""
    found_T: npt.NDArray[np.float32] = errors_T / np.hypot(spread_T, np.float32(SPREAD_MIN))
    return found_T


def summary(found: Statistics) -> Measured:
    """Compute the values that the run's thresholds apply to."""
    proof, stop = (found.get(name, np.zeros(1, np.float32)) for name in ("proof", "stop"))
    return Measured(
        logprob_error_mean=float(found["logprob"].mean(dtype=np.float64)),
        logprob_error_max=float(found["logprob"].max()),
        seed_flips_share=float(found["flip"].mean(dtype=np.float64)),
        proof_error_mean=float(proof.mean(dtype=np.float64)),
        proof_error_max=float(proof.max()),
        seed_margin_max=float(found["margin"].max()),
        stop_margin_max=float(stop.max()),
        choice_deviation=_deviation(found) if "spread" in found else 0.0,
    )


def _deviation(found: Statistics) -> float:
    """Return the deviation of a sum of independent choices from its mean, in its standard deviations.

    A certain choice adds nothing to either.
    """
    sums = {name: float(found[name].sum(dtype=np.float64)) for name in ("surprise", "certainty", "spread")}
    apart = abs(sums["surprise"] - sums["certainty"])
    return apart / math.sqrt(max(sums["spread"], DEVIATION_VARIANCE_MIN)) if math.isfinite(apart) else math.inf


GROSS_NATS = 0.5
"""Nats. A larger mean error of the logprobs means a broken machine, not a hidden cheat."""
GROSS_TOKEN_NATS = 5.0
"""Nats. The same for a single token; the largest honest error seen in bf16 is 0.6."""
GROSS_FLIPS_SHARE = 0.5
"""Share of tokens against the seeds' choice that means the same."""
GROSS_LOGPROBS = (
    "claimed logprobs are far from the policy's, as with other weights, another temperature or faulty memory: "
    "restart the worker; if it persists, test the machine's memory and try another engine"
)
WRONG_LOGPROBS = (
    "claimed logprobs differ from the policy's, as with another precision, a quantised model or an older policy: "
    "try another engine or precision"
)
GROSS_FLIPS = "most tokens differ from those that the seeds choose: the engine does not use the assigned seeds"
WRONG_FLIPS = (
    "too many tokens differ from those that the seeds choose, as with another precision or a quantised model: "
    "try another engine or precision"
)


UNCALIBRATED = (
    "the run has no calibration for this engine and its validator, and the bundle is further from the policy than fp32 "
    "arithmetic explains: use an engine that the run's calibration covers, or ask the operator to calibrate this one"
)
WRONG_CLAIMS = (RejectReason.LOGPROB_MISMATCH, WRONG_LOGPROBS)
WRONG_CHOICES = (RejectReason.SEED_MISMATCH, WRONG_FLIPS)
WRONG_HIDDEN = (RejectReason.PROOF_MISMATCH, "the hidden states do not match the bundle's commitment")
NO_SAMPLES = (RejectReason.IMPLAUSIBLE, "its tokens are not distributed like samples from the policy")
SHOWN_BY = {
    **dict.fromkeys(("margin", "flip", "cooler", "looser", EXCESS_FLIPS, CLOSE_FLIPS), WRONG_CHOICES),
    **dict.fromkeys(LIKELIHOOD_RATIOS, NO_SAMPLES),
    "proof": WRONG_HIDDEN,
}
"""Reasons and details of bundles that are rejected by their own evidence, by the statistic that shows most; WRONG_CLAIMS for
others."""


def judge(measured: Measured, policy: CheckPolicy) -> Verdict:
    """Run checks (5) to (7).

    The detail names one of a few classes, so that an honest contributor can repair a machine. It contains no number:
    the distance of a bundle to a threshold would help to cheat.
    """
    mean, largest, flips = measured.logprob_error_mean, measured.logprob_error_max, measured.seed_flips_share
    if mean > policy.logprob_error_mean_max or largest > policy.logprob_error_max:  # (5)
        return Verdict.refuse(RejectReason.LOGPROB_MISMATCH, GROSS_LOGPROBS if mean > GROSS_NATS else WRONG_LOGPROBS)
    if flips > policy.seed_flips_share_max:  # (6)
        return Verdict.refuse(RejectReason.SEED_MISMATCH, GROSS_FLIPS if flips > GROSS_FLIPS_SHARE else WRONG_FLIPS)
    if measured.stop_margin_max > policy.stop_margin_max:  # (6)
        return Verdict.refuse(
            RejectReason.BAD_TERMINATION, "a completion ends or continues where the seed chooses otherwise"
        )
    if measured.seed_margin_max > policy.seed_margin_max:  # (6)
        return Verdict.refuse(RejectReason.SEED_MISMATCH, "a token is far from the one that the seed chooses")
    if measured.choice_deviation > policy.choice_deviation_max:  # (6)
        return Verdict.refuse(*NO_SAMPLES)
    mean, largest = measured.proof_error_mean, measured.proof_error_max
    if mean > policy.proof_error_mean_max or largest > policy.proof_error_max:  # (7)
        return Verdict.refuse(*WRONG_HIDDEN)
    return Verdict.accept()


def outer(policy: CheckPolicy) -> CheckPolicy:
    """Return the thresholds that no engine exceeds honestly, whatever its arithmetic. Narrower ones stay as they are wide."""
    return policy.model_copy(
        update={
            "logprob_error_mean_max": max(GROSS_NATS, policy.logprob_error_mean_max),
            "logprob_error_max": max(GROSS_TOKEN_NATS, policy.logprob_error_max),
            "seed_flips_share_max": max(GROSS_FLIPS_SHARE, policy.seed_flips_share_max),
            "stop_margin_max": max(
                policy.stop_margin_max, policy.seed_margin_max
            ),  # an end has the same limit as any token
        }
    )


def verdict_on(measured: Measured, evidence: BundleEvidence | None, policy: CheckPolicy) -> Verdict:
    """Run checks (5) to (7) as far as the run's calibration allows.

    Gross errors are a strike for every engine. If the calibration knows both engines, the bundle's own evidence decides.
    If not, nothing shows how far honest engines differ: a bundle beyond the policy's thresholds is rejected without a
    strike.
    """
    verdict = judge(measured, outer(policy))
    if not verdict.accepted:
        return verdict
    if evidence is None or not is_calibrated(evidence):
        verdict = judge(measured, policy)
        return verdict if verdict.accepted else Verdict.refuse(RejectReason.UNVERIFIABLE, UNCALIBRATED)
    shown = shown_alone(evidence, evidence_max=policy.evidence_max)
    return Verdict.accept() if shown is None else Verdict.refuse(*SHOWN_BY.get(shown, WRONG_CLAIMS))


def spans_ascend(rollouts: Rollouts, *, oldest: int, newest: int) -> bool:
    """Return whether policies ascend in each completion's spans, so that it is clear which weights sampled which token."""
    of_S, versions_S = rollouts.spans_S3[:, 0], rollouts.spans_S3[:, 1].astype(np.int64)
    within = versions_S.min() >= oldest and versions_S.max() <= newest
    same_completion = of_S[1:] == of_S[:-1]
    return bool(within and (np.diff(versions_S)[same_completion] > 0).all())


def termination_fault(rollouts: Rollouts, sampling: Sampling) -> str | None:
    """Return why some completion ends where it must not, or None."""
    is_stop_T = np.isin(rollouts.token_ids_T, np.array(sampling.stop_token_ids, dtype=np.int64))
    ends_N = np.cumsum(rollouts.lengths_N.astype(np.int64))
    last_is_stop_N = is_stop_T[ends_N - 1]
    if int(rollouts.lengths_N.max()) > sampling.completion_tokens_max:
        return "a completion is longer than the run's limit"
    if int(is_stop_T.sum()) != int(last_is_stop_N.sum()):
        return "a completion continues after a stop token"
    says_stop_N = rollouts.finish_N == FinishReason.STOP
    if (says_stop_N != last_is_stop_N).any():
        return "a finish reason does not fit its completion's last token"
    if (~last_is_stop_N & (rollouts.lengths_N != sampling.completion_tokens_max)).any():
        return "a completion ends without a stop token before the length limit"
    return None
