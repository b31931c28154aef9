"""Delegations: a person's key authorises the keys of machines, which then count as one contributor. SPEC.md, section 24.

The person's key signs, and need not be on any machine that works. The machine agrees by sending the delegation in the join
request that its own key signs, so no one can claim the machine of another person.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from prime_protocol import limits
from prime_protocol.assignment import Count
from prime_protocol.digest import Digest
from prime_protocol.envelope import Envelope, PayloadType, WireModel, open_base64, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import KeyId

DelegationText = Annotated[str, StringConstraints(max_length=limits.DELEGATION_CHARS_MAX)]
"""Envelope of a delegation in URL-safe base64, as its owner copies it from one machine to another."""


class Delegation(WireModel):
    """Authorisation of one machine (envelope type DELEGATION)."""

    person: KeyId
    """Key that signs this delegation."""
    machine: KeyId
    """Key that may take part as a machine of this person."""
    run: Digest | None = Field(default=None, exclude_if=lambda run: run is None)
    """Only run in which it holds; None: every run."""
    issued_at_ms: Count
    """Unix time by the person's clock. A revocation ends all delegations of a machine, whatever their dates."""
    expires_at_ms: Count
    """Its end."""

    @model_validator(mode="after")
    def _is_for_a_limited_time(self) -> Self:
        if self.person == self.machine:
            raise ValueError("a person's key cannot authorise itself")
        if not 0 < self.expires_at_ms - self.issued_at_ms <= limits.DELEGATION_LIFETIME_S_MAX * 1_000:
            raise ValueError("it ends before it begins, or lasts too long")
        return self


def read_delegation(text: str) -> tuple[Delegation, Envelope]:
    """Parse a delegation that its person's key signed, for any machine, run and time. Raises RemoteError.

    (1) size, framing and one signer; (2) its signature, then the schema; (3) the signer is the person that it names.
    """
    if len(text) > limits.DELEGATION_CHARS_MAX:  # (1)
        raise LimitExceeded("DELEGATION_CHARS_MAX", len(text), limits.DELEGATION_CHARS_MAX)
    envelope = open_base64(text, "a delegation")
    payload = envelope.verify(PayloadType.DELEGATION, trusted=(envelope.sole_signer(),))  # (2)
    delegation = parse_json(payload, Delegation)
    if delegation.person != envelope.sole_signer():  # (3)
        raise RemoteError(ErrorCode.BAD_SIGNATURE, "a delegation is signed by the person's key that it names")
    return delegation, envelope


def open_delegation(text: str, machine: str, run: str, *, now_ms: int) -> Delegation:
    """Verify a delegation that a machine presents to a run (its digest). Raises RemoteError.

    (1) to (3) as `read_delegation`; (4) it authorises this machine; (5) for this run; (6) it was issued, and has not expired.
    """
    delegation, _ = read_delegation(text)
    if delegation.machine != machine:  # (4)
        raise RemoteError(ErrorCode.WRONG_ROLE, f"the delegation authorises {delegation.machine}, not {machine}")
    if delegation.run not in (None, run):  # (5)
        raise RemoteError(ErrorCode.WRONG_RUN, f"the delegation is for run {delegation.run[:12]}, not {run[:12]}")
    if delegation.issued_at_ms > now_ms + limits.REQUEST_AGE_S_MAX * 1_000:  # (6)
        raise RemoteError(ErrorCode.EXPIRED, "the delegation was issued in the future; check the clock of its person")
    if delegation.expires_at_ms < now_ms:
        raise RemoteError(ErrorCode.EXPIRED, "the delegation has expired; authorise the machine again")
    return delegation
