"""What a worker does, why it waits, and why rollouts were rejected, in sentences for its contributor. Pure."""

from __future__ import annotations

from prime_node.worker.control import ON_REQUEST
from prime_node.worker.status import Status
from prime_protocol.requests import WorkerState
from prime_protocol.verdict import RejectReason

REASONS = {
    RejectReason.STALE: "too late: the step was trained, or the policy was too old",
    RejectReason.FUTURE: "for a step or a policy that does not exist yet",
    RejectReason.LEASE_EXPIRED: "too late: the lease had ended",
    RejectReason.DUPLICATE: "sent before for the same lease",
    RejectReason.WRONG_POLICY: "by another policy than the lease names",
    RejectReason.WRONG_ASSIGNMENT: "other problems or seeds than assigned",
    RejectReason.WRONG_CONTEXT: "a turn does not continue the dialogue",
    RejectReason.INCOMPLETE: "the environment failed on this machine",
    RejectReason.TOKEN_OUT_OF_RANGE: "a token outside the vocabulary",
    RejectReason.BAD_TERMINATION: "an answer ends at the wrong place",
    RejectReason.LOGPROB_MISMATCH: "log probabilities are not those of the policy",
    RejectReason.SEED_MISMATCH: "tokens are not those that the seeds choose",
    RejectReason.PROOF_MISMATCH: "hidden states are not those of the policy",
    RejectReason.EQUIVOCATION: "two different answers to one lease",
    RejectReason.COPIED: "text of an earlier answer",
    RejectReason.STATISTICAL: "all evidence together contradicts the policy",
    RejectReason.IMPLAUSIBLE: "tokens are not plausible for the policy",
    RejectReason.MALFORMED: "not as the protocol describes",
    RejectReason.BANNED: "this key was banned meanwhile",
    RejectReason.UNPROVEN: "in escrow when another bundle was found dishonest",
    RejectReason.UNVERIFIABLE: "no validator could check them",
}
"""Reason of a rejection -> what is wrong with the rollouts."""


def reason_in_words(reason: str) -> str:
    """Return what is wrong with rollouts. A reason that this release does not know is returned with spaces."""
    return REASONS[RejectReason(reason)] if reason in REASONS else reason.replace("_", " ")


def speed_now(status: Status) -> float:
    """Return the tokens per second of a worker that generates; 0 while it does not. The status has the last measured speed."""
    return status.tokens_per_s if doing(status)[0] in ("Generating", "Finishing", "No answer") else 0.0


def doing(status: Status) -> tuple[str, str]:
    """Return what a worker does in a word, and a sentence on it.

    Example: ("Paused", "It computes nothing until 22:00, as its hours are 22:00-07:00.").
    """
    if status.ended:
        return "Ended", f"The worker has ended: {status.ended}."
    if status.coordinator_away_s is not None:
        away = f"The coordinator has not answered for {status.coordinator_away_s:.0f} s."
        return "No answer", f"{away} Finished work stays on this disk, and is uploaded once it answers."
    if status.state is WorkerState.DRAINING:
        return "Finishing", "It takes no new work, finishes and uploads what it has, and leaves the run."
    if status.paused == ON_REQUEST:
        return "Paused", "It was paused on request, and computes nothing until it is resumed."
    if status.paused:
        return "Paused", f"It computes nothing {status.paused}."
    if status.waiting_for:
        return "Waiting", f"It waits: {status.waiting_for}."
    if status.state is WorkerState.GENERATING:
        return "Generating", f"It generates answers for step {status.step:,} with policy {status.policy_version:,}."
    if status.state is WorkerState.FETCHING:
        return "Fetching", f"It fetches policy {status.head:,}." if status.head >= 0 else "It fetches the first policy."
    return "Ready", "It asks for the next work."
