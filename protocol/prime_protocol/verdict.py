"""Verdicts: what became of a bundle, why, and the signed receipt that a worker can keep."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field, model_validator

from prime_protocol import limits
from prime_protocol.assigned import Assigned
from prime_protocol.assignment import Count, Step, Text
from prime_protocol.digest import Digest
from prime_protocol.envelope import WireModel
from prime_protocol.evidence import Weighed
from prime_protocol.identity import KeyId
from prime_protocol.visible import printable


class RejectReason(StrEnum):
    """Why a well-formed, signed bundle was refused. `is_dishonest` says which of them count as a strike."""

    STALE = "stale"
    """Its step has been trained, or its policy is more than async_level behind."""
    FUTURE = "future"
    """Its step or policy does not exist yet."""
    LEASE_EXPIRED = "lease_expired"
    """The lease ended before the upload came; its groups have gone to another worker."""
    DUPLICATE = "duplicate"
    """The lease has been redeemed by another bundle."""
    WRONG_POLICY = "wrong_policy"
    """Another policy, or other spans of policies, than the lease names."""
    WRONG_ASSIGNMENT = "wrong_assignment"
    """Other groups, order or seeds than assigned."""
    WRONG_CONTEXT = "wrong_context"
    """A turn's prompt is not what the environment says behind the answers so far."""
    INCOMPLETE = "incomplete"
    """An environment goes on where a rollout ends: it failed on its worker's machine. Or it plays another problem than that of an
    evaluation, as releases from before the evaluations do. Counts as a lease that was handed back."""
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    """A token id outside the vocabulary."""
    BAD_TERMINATION = "bad_termination"
    """It goes on after a stop token, stops without one, ends before its limit, or the seed chooses otherwise at its end."""
    LOGPROB_MISMATCH = "logprob_mismatch"
    """The claimed logprobs are not those of the claimed policy."""
    SEED_MISMATCH = "seed_mismatch"
    """The tokens are not the ones that the assigned seeds choose."""
    PROOF_MISMATCH = "proof_mismatch"
    """The hidden states that it commits to are not those of the claimed policy."""
    EQUIVOCATION = "equivocation"
    """Its worker signed two different bundles for one lease. Both headers are kept."""
    COPIED = "copied"
    """It holds what another completion said before, and what nobody says twice by chance."""
    STATISTICAL = "statistical"
    """Nothing in this bundle decides by itself, but with the worker's earlier ones the evidence has reached the run's limit."""
    IMPLAUSIBLE = "implausible"
    """An unseeded engine's tokens are not what sampling from the claimed policy gives."""
    MALFORMED = "malformed"
    """The signed header is sound, but the body is not what SPEC.md describes."""
    BANNED = "banned"
    """The worker was banned while the bundle waited."""
    UNPROVEN = "unproven"
    """It was not audited, and a dishonest bundle of the same worker came to light before it stood for itself."""
    UNVERIFIABLE = "unverifiable"
    """No validator could judge it in time. Nobody's fault: its groups are leased again."""

    @property
    def is_dishonest(self) -> bool:
        """True where neither bad luck nor a slow line explains it."""
        return self in _DISHONEST


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


class Verdict(WireModel):
    """Accepted, or refused with a reason. Example: Verdict.refuse(RejectReason.STALE, "step 3 is trained")."""

    accepted: bool
    reason: RejectReason | None = None
    detail: Text = ""
    """For a person: a rule, or a class of error. Never a measured number: how near a bundle came would help to cheat."""

    @model_validator(mode="after")
    def _reason_goes_with_refusal(self) -> Verdict:
        if self.accepted == (self.reason is not None):
            raise ValueError("a refused verdict has a reason, an accepted one has none")
        return self

    @classmethod
    def accept(cls) -> Verdict:
        return cls(accepted=True)

    @classmethod
    def refuse(cls, reason: RejectReason, detail: str = "") -> Verdict:
        return cls(accepted=False, reason=reason, detail=printable(detail, limits.TEXT_CHARS_MAX))


class BundleStatus(StrEnum):
    """Where a bundle is on its way."""

    PENDING = "pending"
    """Durable at the coordinator, waiting for a validator."""
    ACCEPTED = "accepted"
    REFUSED = "refused"


class BanKind(StrEnum):
    """What a ban rests on."""

    HARD = "hard"
    """Bundles each of which was refused for a reason that neither bad luck nor a slow line explains."""
    STATISTICAL = "statistical"
    """All its bundles together: their evidence has reached the run's limit."""
    OPERATOR = "operator"
    """The operator's word."""


class Receipt(WireModel):
    """The coordinator's signed word on one bundle. A worker that keeps its receipts can prove what it did."""

    run: Digest
    worker: KeyId
    lease_id: Digest
    bundle: Digest
    """Digest of the whole parcel as uploaded."""
    step: Step
    policy_version: Step
    num_rollouts: Count
    num_tokens: Count
    """Completion tokens that this receipt credits: the bundle's, or, where a worker's last bundles stand surety, those of the
    one that is released. 0 where it was refused."""
    status: BundleStatus
    reason: RejectReason | None = None
    detail: Text = ""
    at_ms: Count
    evidence: Weighed | None = Field(default=None, exclude_if=lambda value: value is None)
    """What it added to the evidence against the worker; null where it was not weighed."""
    assigned: Assigned | None = Field(default=None, exclude_if=lambda value: value is None)
    """What was assigned; in a bundle's first receipt that accepts it, where the run has a seed chain."""

    @model_validator(mode="after")
    def _reason_goes_with_refusal(self) -> Receipt:
        if (self.status is BundleStatus.REFUSED) != (self.reason is not None):
            raise ValueError("a receipt has a reason exactly where the bundle was refused")
        return self
