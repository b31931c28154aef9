"""Verdicts on bundles, with their reasons, and the signed receipts that workers keep.

SPEC.md, sections 9 and 21, has the rule by which a receipt contradicts the lease of its bundle. The coordinator signs both.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.assigned import Assigned, assigned_in, digest_of_prompts
from prime_protocol.assignment import Count, Lease, Step, Text
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.evidence import Weighed
from prime_protocol.identity import KeyId
from prime_protocol.run_spec import RunSpec
from prime_protocol.visible import printable


class RejectReason(StrEnum):
    """Reason why a well-formed, signed bundle was rejected. `is_dishonest` marks those that count as a strike."""

    STALE = "stale"
    """Step already trained, or policy more than async_level behind."""
    FUTURE = "future"
    """Step or policy that does not exist yet."""
    LEASE_EXPIRED = "lease_expired"
    """Lease that ended before the upload; its groups have gone to another worker."""
    DUPLICATE = "duplicate"
    """Lease that another bundle has already redeemed."""
    WRONG_POLICY = "wrong_policy"
    """Policy, or spans of policies, other than the lease names."""
    WRONG_ASSIGNMENT = "wrong_assignment"
    """Groups, order or seeds other than assigned."""
    WRONG_CONTEXT = "wrong_context"
    """Prompt of a turn that does not match the environment's reply to the answers so far."""
    INCOMPLETE = "incomplete"
    """Rollout that ends although its environment continues: the environment failed on the worker's machine. Or the
    environment plays another problem than the evaluation's, as releases without evaluations do. Counts as a lease
    that was handed back."""
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    """Token id outside the vocabulary."""
    BAD_TERMINATION = "bad_termination"
    """Completion that continues after a stop token, stops without one, ends before its limit, or ends against the seed's
    choice."""
    LOGPROB_MISMATCH = "logprob_mismatch"
    """Claimed logprobs that are not those of the claimed policy."""
    SEED_MISMATCH = "seed_mismatch"
    """Tokens that the assigned seeds do not choose."""
    PROOF_MISMATCH = "proof_mismatch"
    """Committed hidden states that are not those of the claimed policy."""
    EQUIVOCATION = "equivocation"
    """Second, different bundle that its worker signed for one lease. Both headers are kept."""
    COPIED = "copied"
    """Text of an earlier completion that does not occur twice by chance."""
    STATISTICAL = "statistical"
    """Bundle that decides nothing alone, but with which the worker's evidence has reached the run's limit."""
    IMPLAUSIBLE = "implausible"
    """Tokens of an unseeded engine that are not plausible samples of the claimed policy."""
    MALFORMED = "malformed"
    """Valid signed header, but a body other than SPEC.md describes."""
    BANNED = "banned"
    """Bundle whose worker was banned while it waited."""
    UNPROVEN = "unproven"
    """Unaudited bundle in escrow when a dishonest bundle of the same worker was found."""
    UNVERIFIABLE = "unverifiable"
    """Bundle that no validator could judge, that none judged in time, or whose engine the run's calibration lacks and that
    is further from the policy than fp32 arithmetic explains. Its groups are leased again."""

    @property
    def is_dishonest(self) -> bool:
        """Whether neither bad luck nor a slow connection explains the reason."""
        return self in _DISHONEST

    @property
    def is_for_validators(self) -> bool:
        """Whether a validator may find the reason. The coordinator alone finds the others: time, leases, bans, all evidence."""
        return self in _FOR_VALIDATORS


_DISHONEST = frozenset(
    {
        RejectReason.WRONG_POLICY,
        RejectReason.WRONG_ASSIGNMENT,
        RejectReason.WRONG_CONTEXT,
        RejectReason.TOKEN_OUT_OF_RANGE,
        RejectReason.BAD_TERMINATION,
        RejectReason.LOGPROB_MISMATCH,
        RejectReason.SEED_MISMATCH,
        RejectReason.PROOF_MISMATCH,
        RejectReason.IMPLAUSIBLE,
        RejectReason.COPIED,
        RejectReason.EQUIVOCATION,
        RejectReason.STATISTICAL,
        RejectReason.MALFORMED,
    }
)
_FOR_VALIDATORS = _DISHONEST - {RejectReason.EQUIVOCATION, RejectReason.STATISTICAL} | {
    RejectReason.INCOMPLETE,
    RejectReason.UNVERIFIABLE,
}


class Verdict(WireModel):
    """Acceptance, or rejection with a reason. Example: Verdict.refuse(RejectReason.STALE, "step 3 is trained")."""

    accepted: bool
    reason: RejectReason | None = None
    detail: Text = ""
    """Rule or class of error, for display. Never a measured number: the distance to a threshold would help to cheat."""

    @model_validator(mode="after")
    def _reason_goes_with_refusal(self) -> Verdict:
        if self.accepted == (self.reason is not None):
            raise ValueError("a rejection must have a reason, an acceptance must have none")
        return self

    @classmethod
    def accept(cls) -> Verdict:
        """Return the verdict of an accepted bundle."""
        return cls(accepted=True)

    @classmethod
    def refuse(cls, reason: RejectReason, detail: str = "") -> Verdict:
        """Return the verdict of a bundle that is rejected for `reason`."""
        return cls(accepted=False, reason=reason, detail=printable(detail, limits.TEXT_CHARS_MAX))


class BundleStatus(StrEnum):
    """State of a bundle."""

    PENDING = "pending"
    """Durable at the coordinator, waiting for a validator."""
    ACCEPTED = "accepted"
    REFUSED = "refused"


class BanKind(StrEnum):
    """Basis of a ban."""

    HARD = "hard"
    """Several bundles, each rejected for a reason that neither bad luck nor a slow connection explains."""
    STATISTICAL = "statistical"
    """The evidence of all the worker's bundles together has reached the run's limit."""
    OPERATOR = "operator"
    """Decision of the operator."""


class Receipt(WireModel):
    """Coordinator's signed statement on one bundle. With its receipts a worker can prove what it did."""

    run: Digest
    worker: KeyId
    lease_id: Digest
    bundle: Digest
    """Digest of the whole parcel as uploaded."""
    step: Step
    policy_version: Step
    num_rollouts: Count
    num_tokens: Count
    """Completion tokens that this receipt credits: the bundle's, or, if the worker's last bundles are in escrow, those
    of the released one. 0 if it was rejected."""
    status: BundleStatus
    reason: RejectReason | None = None
    detail: Text = ""
    at_ms: Count
    evidence: Weighed | None = Field(default=None, exclude_if=lambda value: value is None)
    """Bundle's contribution to the evidence against the worker; null if it was not weighed."""
    assigned: Assigned | None = Field(default=None, exclude_if=lambda value: value is None)
    """Assignment of the bundle, in each accepting receipt, if the run has a seed chain."""

    @model_validator(mode="after")
    def _reason_goes_with_refusal(self) -> Receipt:
        if (self.status is BundleStatus.REFUSED) != (self.reason is not None):
            raise ValueError("a receipt must have a reason if and only if the bundle was rejected")
        return self


_SAME = ("lease_id", "step", "policy_version", "num_rollouts")


def contradiction(receipt: Receipt, lease: Lease, spec: RunSpec) -> str:
    """Return, as text for people, what a receipt says of its bundle and the lease of that bundle does not; empty if they agree.

    A receipt that is dated before its lease contradicts it too: a coordinator that dates receipts back could omit one from
    the ledger.
    """
    if receipt.at_ms < lease.issued_at_ms:
        return f"the receipt is dated {lease.issued_at_ms - receipt.at_ms:,} ms before its lease"
    for name in _SAME:
        said, leased = getattr(receipt, name), getattr(lease, name)
        if said != leased:
            return f"the receipt says {name} {said}, the lease {leased}"
    assigned, groups = receipt.assigned, lease.groups
    if assigned is None:
        is_missing = spec.seed_chain is not None and receipt.status is BundleStatus.ACCEPTED
        return "the receipt accepts the bundle and lacks its assignment" if is_missing else ""
    if len(assigned.draws) not in (0, len(groups)):
        return f"the receipt says {len(assigned.draws)} groups, the lease {len(groups)}"
    prompts = digest_of_prompts(each.prompt_token_ids for each in groups) if spec.commits_to_prompts else None
    leased = assigned_in(groups, assigned.draws, prompts=prompts)
    for name, what in (("slots", "slots"), ("seeds", "problems or seeds"), ("prompts", "prompts")):
        if getattr(assigned, name) != getattr(leased, name):
            return f"the receipt says other {what} than the lease"
    return ""
