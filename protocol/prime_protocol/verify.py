"""The checks on a bundle of rollouts. Numbered, cheap ones first; the first that fails gives the reason.

    (1) the policy is the lease's, spans as allowed       WRONG_POLICY
    (2) turns are as many as allowed, of that length      WRONG_CONTEXT
        lease, groups, order, seeds are the assigned ones WRONG_ASSIGNMENT
    (3) token ids are within the vocabulary               TOKEN_OUT_OF_RANGE
    (4) each completion ends where it must                BAD_TERMINATION
    (5) claimed logprobs are the policy's                 LOGPROB_MISMATCH
    (6) tokens are the ones that the seeds choose         SEED_MISMATCH, at a completion's end BAD_TERMINATION
    (7) hidden states are those that it commits to        PROOF_MISMATCH

Of engines that choose by randomness of their own, where the run takes them, (6) asks instead whether the tokens are what sampling
gives: not too probable, nor too improbable, all in all      IMPLAUSIBLE

(1) to (4) need only the lease. (5) to (7) need a forward pass of the claimed policy over prompt and completion, by someone
trusted; they take its numbers as arrays. Steps are judged by step.check, envelopes by envelope.py, before any of these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from prime_protocol.assignment import Lease, Sampling
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.excess_flips import apart
from prime_protocol.proof import Bits, compare_proofs
from prime_protocol.rollout import FinishReason, RolloutHeader, Rollouts
from prime_protocol.run_spec import CheckPolicy, RunSpec
from prime_protocol.shading import rises
from prime_protocol.turns import has_assigned_seeds, prompt_fault, size_fault
from prime_protocol.verdict import RejectReason, Verdict

SHARPER, FLATTER = 0.8, 1.25
"""Temperatures, beside the run's, that unseeded choices are held against."""
LIKELIHOOD_RATIOS = ("sharper", "flatter")
"""Statistics that may be below 0: their exponential has the mean 1 for whoever samples from the policy."""
RATIO_NATS_MIN = -60.0
OF_SEEDS = frozenset({"margin", "flip", "stop"})
"""Statistics that say something only where the seeds decide."""

GROSS_FACTOR = 10.0
"""Thresholds are so many times as wide where a calibration knows how far honest engines differ."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a trusted forward pass says about a bundle's T completion tokens, in the bundle's order."""

    logprobs_T: npt.NDArray[np.float32]  # [T] nats, at the run's temperature
    margins_T: npt.NDArray[np.float32]
    """[T] best noisy score minus the chosen token's: 0 where the token is the one that the seed chooses, else above 0."""
    hidden_TD: Bits | None = None
    """[T, D] bf16: the last hidden state that each token was chosen from. None where it was not asked for."""
    stop_margins_T: npt.NDArray[np.float32] | None = None
    """[T] of a stop token its margin; of another token, by how much a stop token was the better choice, or 0."""
    expected_T: npt.NDArray[np.float32] | None = None
    """[T] the mean of the logprob over what might have been chosen, where there is no seed. Margins are the filters' alone."""
    variance_T: npt.NDArray[np.float32] | None = None
    """[T] and its variance."""
    sharper_T: npt.NDArray[np.float32] | None = None
    """[T] without seeds and filters: nats by which the token would be likelier at SHARPER times the temperature."""
    flatter_T: npt.NDArray[np.float32] | None = None
    """[T] and at FLATTER times the temperature."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Those that are there, by the names of their fields; of each, the first dimension is T."""
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: array for name, array in named.items() if array is not None}


DEVIATION_VARIANCE_MIN = 1.0
"""Nats squared. A bundle of almost certain tokens is not judged by the little chance that is in it."""

Statistics = Mapping[str, npt.NDArray[np.float32]]
"""What each token of a bundle says against its worker, by name: at least 0, and 0 where claim and forward pass agree, but for
`rise` and LIKELIHOOD_RATIOS."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers behind a verdict."""

    logprob_error_mean: float
    logprob_error_max: float
    seed_flips_share: float
    proof_error_mean: float = 0.0
    proof_error_max: float = 0.0
    seed_margin_max: float = 0.0
    stop_margin_max: float = 0.0
    choice_deviation: float = 0.0
    """Standard deviations, of an unseeded bundle."""


def require_proofs(rollouts: Rollouts, policy: CheckPolicy) -> None:
    """Hidden-state proofs are there exactly where the run asks for them; how many is a matter of the bundle's form.

    Raises PeerError(MALFORMED).
    """
    if policy.proofs != (rollouts.proofs_CB is not None):
        raise PeerError(ErrorCode.MALFORMED, f"the run asks for {'' if policy.proofs else 'no '}hidden-state proofs")


def require_seeded(header: RolloutHeader, policy: CheckPolicy) -> None:
    """Raises PeerError(MALFORMED) where a bundle says that it does without seeds, and the run does not."""
    if not (header.engine.seeded or policy.unseeded):
        raise PeerError(ErrorCode.MALFORMED, "the run takes no unseeded engines")


def check_assignment(
    header: RolloutHeader,
    rollouts: Rollouts,
    lease: Lease,
    *,
    vocab_size: int,
    newest_policy: int | None = None,
    turns: RunSpec | None = None,
) -> Verdict:
    """Checks (1) to (4). `newest_policy`: the newest that a token may be of, where the run lets completions span policies.
    `turns`: the run whose environments say how many turns there may be; without it there is one of each rollout."""
    same_policy = header.policy_version == lease.policy_version and header.policy_digest == lease.policy_digest
    if not same_policy:  # (1)
        return Verdict.refuse(RejectReason.WRONG_POLICY, f"the lease asks for policy {lease.policy_version}")
    newest = lease.policy_version if newest_policy is None else newest_policy
    if not _spans_ascend(rollouts, oldest=lease.policy_version, newest=newest):
        detail = f"spans go up, from policy {lease.policy_version} to {newest} at most"
        return Verdict.refuse(RejectReason.WRONG_POLICY, detail)
    same_lease = (header.run, header.worker, header.lease_id, header.step) == (
        lease.run,
        lease.worker,
        lease.lease_id,
        lease.step,
    )
    fault = size_fault(rollouts, lease, turns) if same_lease else None  # (2), before anything is computed for each turn
    if fault is not None:
        return Verdict.refuse(RejectReason.WRONG_CONTEXT, fault)
    if not same_lease or not has_assigned_seeds(rollouts, lease):
        return Verdict.refuse(RejectReason.WRONG_ASSIGNMENT, "lease, groups, order or seeds are not the assigned ones")
    fault = prompt_fault(rollouts, lease, turns)
    if fault is not None:
        return Verdict.refuse(RejectReason.WRONG_CONTEXT, fault)
    if int(rollouts.token_ids_T.max()) >= vocab_size:  # (3)
        return Verdict.refuse(RejectReason.TOKEN_OUT_OF_RANGE, f"token ids are below {vocab_size}")
    fault = _termination_fault(rollouts, lease.sampling)
    if fault is not None:  # (4)
        return Verdict.refuse(RejectReason.BAD_TERMINATION, fault)
    return Verdict.accept()


def statistics(rollouts: Rollouts, prefill: Prefill) -> Statistics:
    """Compare claims with a trusted forward pass. What is not a number counts against the bundle, as infinity.

    margin [T]: by how much another token's noisy score is above the chosen one's
    flip [T]: 1 where another token's score is above it at all, so that a choice among near-ties is budgeted too
    logprob [T]: nats between the claimed logprob and the recomputed one
    apart [T]: |1 - p / p'| of their probabilities, by which alone a flip is explained (excess_flips.py)
    rise [T]: p / p' - 1, with its sign (shading.py)
    stop [T]: margin of a stop token, or by how much one was better than what was chosen, where `prefill` says so
    surprise, certainty, spread [T]: without seeds, by how much the logprob is below or above its mean, and its variance
    sharper, flatter [T]: without seeds, nats by which the token would be likelier at another temperature; below 0 where it is not
    proof [C]: mean distance of each hidden-state proof, where the bundle carries them and `prefill` has hidden states
    """
    assert rollouts.logprobs_T.shape == prefill.logprobs_T.shape == prefill.margins_T.shape
    errors_T = np.abs(rollouts.logprobs_T.astype(np.float64) - prefill.logprobs_T.astype(np.float64))
    flips_T = (~(prefill.margins_T <= 0)).astype(np.float32)
    found = {"margin": prefill.margins_T, "flip": flips_T, "logprob": errors_T.astype(np.float32)}
    found["apart"] = apart(rollouts.logprobs_T, prefill.logprobs_T).astype(np.float32)
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
    for name, ratios_T in zip(LIKELIHOOD_RATIOS, (prefill.sharper_T, prefill.flatter_T), strict=True):
        if ratios_T is not None:
            found[name] = np.maximum(
                np.nan_to_num(ratios_T, nan=np.inf, posinf=np.inf, neginf=RATIO_NATS_MIN), RATIO_NATS_MIN
            )
    return found


def measure_logprobs(rollouts: Rollouts, prefill: Prefill) -> Measured:
    """The numbers that the run's thresholds are for."""
    return summary(statistics(rollouts, prefill))


def summary(found: Statistics) -> Measured:
    """The same, of statistics that are at hand."""
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
    """Of a sum of independent choices from its mean, in its own standard deviations; a certain choice adds nothing to either."""
    sums = {name: float(found[name].sum(dtype=np.float64)) for name in ("surprise", "certainty", "spread")}
    apart = abs(sums["surprise"] - sums["certainty"])
    return apart / math.sqrt(max(sums["spread"], DEVIATION_VARIANCE_MIN)) if math.isfinite(apart) else math.inf


GROSS_NATS = 0.5
"""A larger mean error of the logprobs, in nats, means a broken machine and no cheat that hides."""
GROSS_FLIPS_SHARE = 0.5
"""The same of tokens that the seeds do not choose."""
GROSS_LOGPROBS = (
    "claimed logprobs are far from the policy's, as those of other weights, of another temperature or from broken memory: "
    "start the worker again; if it lasts, test the machine's memory and try another engine"
)
WRONG_LOGPROBS = (
    "claimed logprobs are not those of the policy, as with another precision, a quantised model or an older policy: "
    "try another engine or precision"
)
GROSS_FLIPS = "most of the tokens are not the ones that the seeds choose: the engine does not use the assigned seeds"
WRONG_FLIPS = (
    "too many of the tokens are not the ones that the seeds choose, as with another precision or a quantised model: "
    "try another engine or precision"
)


def judge(measured: Measured, policy: CheckPolicy) -> Verdict:
    """Checks (5) to (7).

    The detail names one of a few classes, so that an honest contributor can mend a machine. It tells no number: how near a
    bundle came to a threshold would help to cheat.
    """
    mean, largest, flips = measured.logprob_error_mean, measured.logprob_error_max, measured.seed_flips_share
    if mean > policy.logprob_error_mean_max or largest > policy.logprob_error_max:  # (5)
        return Verdict.refuse(RejectReason.LOGPROB_MISMATCH, GROSS_LOGPROBS if mean > GROSS_NATS else WRONG_LOGPROBS)
    if flips > policy.seed_flips_share_max:  # (6)
        return Verdict.refuse(RejectReason.SEED_MISMATCH, GROSS_FLIPS if flips > GROSS_FLIPS_SHARE else WRONG_FLIPS)
    if measured.stop_margin_max > policy.stop_margin_max:  # (6)
        return Verdict.refuse(
            RejectReason.BAD_TERMINATION, "a completion ends, or goes on, where the seed chooses otherwise"
        )
    if measured.seed_margin_max > policy.seed_margin_max:  # (6)
        return Verdict.refuse(RejectReason.SEED_MISMATCH, "a token is far from being the one that the seed chooses")
    if measured.choice_deviation > policy.choice_deviation_max:  # (6)
        return Verdict.refuse(RejectReason.IMPLAUSIBLE, "its tokens are not what sampling from the policy gives")
    mean, largest = measured.proof_error_mean, measured.proof_error_max
    if mean > policy.proof_error_mean_max or largest > policy.proof_error_max:  # (7)
        return Verdict.refuse(RejectReason.PROOF_MISMATCH, "the hidden states are not those that the bundle commits to")
    return Verdict.accept()


def widened(policy: CheckPolicy) -> CheckPolicy:
    """The thresholds for a bundle that the run's calibration speaks for (calibration.py): only what is grossly wrong is refused.

    The defaults are for fp32 on both sides: of bundles that bf16 sampled and fp32 judged they refuse more than half.
    """
    return policy.model_copy(
        update={
            "logprob_error_mean_max": GROSS_FACTOR * policy.logprob_error_mean_max,
            "logprob_error_max": GROSS_FACTOR * policy.logprob_error_max,
            "seed_flips_share_max": min(1.0, GROSS_FACTOR * policy.seed_flips_share_max),
            "stop_margin_max": max(
                policy.stop_margin_max, policy.seed_margin_max
            ),  # an end is held to what any token is
        }
    )


def _spans_ascend(rollouts: Rollouts, *, oldest: int, newest: int) -> bool:
    """Each completion's spans are of ever newer policies: it can be told which weights sampled which token."""
    of_S, versions_S = rollouts.spans_S3[:, 0], rollouts.spans_S3[:, 1].astype(np.int64)
    within = versions_S.min() >= oldest and versions_S.max() <= newest
    same_completion = of_S[1:] == of_S[:-1]
    return bool(within and (np.diff(versions_S)[same_completion] > 0).all())


def _termination_fault(rollouts: Rollouts, sampling: Sampling) -> str | None:
    """Why some completion ends where it must not, or None."""
    is_stop_T = np.isin(rollouts.token_ids_T, np.array(sampling.stop_token_ids, dtype=np.int64))
    ends_N = np.cumsum(rollouts.lengths_N.astype(np.int64))
    last_is_stop_N = is_stop_T[ends_N - 1]
    if int(rollouts.lengths_N.max()) > sampling.completion_tokens_max:
        return "a completion is longer than the run's limit"
    if int(is_stop_T.sum()) != int(last_is_stop_N.sum()):
        return "a completion goes on after a stop token"
    says_stop_N = rollouts.finish_N == FinishReason.STOP
    if (says_stop_N != last_is_stop_N).any():
        return "a finish reason does not fit its completion's last token"
    if (~last_is_stop_N & (rollouts.lengths_N != sampling.completion_tokens_max)).any():
        return "a completion ends without a stop token before the length limit"
    return None
