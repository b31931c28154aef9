"""Invitations: signed permission to join with some keys. If a coordinator requires them, a new key needs one to join.

An invitation is a bearer token, signed by the root or by a coordinator. Its holder may use it for as many keys as it
states. It names no key, so the operator can issue it before its user has one. SPEC.md, section 23.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from prime_protocol import limits
from prime_protocol.assignment import Count
from prime_protocol.digest import Digest
from prime_protocol.envelope import PayloadType, WireModel, open_base64, parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.key_ring import Role
from prime_protocol.run_spec import PinnedRun

InviteText = Annotated[str, StringConstraints(max_length=limits.INVITE_CHARS_MAX)]
"""Envelope of an invitation in URL-safe base64, as users pass it on."""


class Invite(WireModel):
    """Invitation (envelope type INVITE)."""

    run: Digest
    invite: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")]
    """Identifier: 16 random bytes."""
    keys_max: int = Field(ge=1, le=limits.COUNT_MAX)
    """Number of keys that may join with it."""
    expires_at_ms: Count
    """Time until which new keys may join."""


def invited_run(text: str) -> str:
    """Return the digest of the run that an invitation names. Its signature is not checked. Raises RemoteError."""
    return parse_json(open_base64(text, "an invitation").payload, Invite).run


def open_invite(text: str, run: PinnedRun, *, now_ms: int) -> Invite:
    """Verify an invitation and parse it. Raises RemoteError.

    (1) size and framing; (2) a current root or coordinator key signed it; (3) schema; (4) this run; (5) it has not
    expired.
    """
    if len(text) > limits.INVITE_CHARS_MAX:  # (1)
        raise LimitExceeded("INVITE_CHARS_MAX", len(text), limits.INVITE_CHARS_MAX)
    envelope = open_base64(text, "an invitation")
    keys = run.keys.current
    payload = envelope.verify(PayloadType.INVITE, trusted=keys.of(Role.ROOT) + keys.of(Role.COORDINATOR))  # (2)
    invite = parse_json(payload, Invite)  # (3)
    if invite.run != run.digest:  # (4)
        raise RemoteError(ErrorCode.WRONG_RUN, f"the invitation is for run {invite.run[:12]}, not {run.digest[:12]}")
    if invite.expires_at_ms < now_ms:  # (5)
        raise RemoteError(ErrorCode.EXPIRED, "this invitation has expired; ask the operator for another one")
    return invite
