"""Signed claim about a request's body, checked before the body is read. SPEC.md, section "HTTP".

A server must not buffer a stranger's bytes in the space reserved for participants. So a signed request without a body
travels in the header `Prime-Request`. A request with a body announces it in the header `Prime-Body`: an envelope around
a `BodyClaim`, which binds the signer to this endpoint, this length and these bytes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Count
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.requests import Epoch, Nonce

REQUEST_HEADER = "Prime-Request"
"""Header that holds a whole signed request: its envelope, as JSON text."""
CLAIM_HEADER = "Prime-Body"
"""Header that announces a body: the envelope of a BodyClaim, as JSON text."""


class BodyClaim(WireModel):
    """Claim that a sender makes before it sends a body (envelope type BODY_CLAIM)."""

    run: Digest
    action: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$", max_length=32)]
    """Endpoint: the part of its path after /v1/."""
    nonce: Nonce
    issued_at_ms: Count
    epoch: Epoch = ""
    """Epoch of the server, as in a stamped request."""
    body_digest: Digest
    body_bytes: int = Field(ge=1, le=limits.COUNT_MAX)


def claim_of(body: bytes, key: SigningKey, *, run: str, action: str, nonce: str, now_ms: int, epoch: str = "") -> str:
    """Return the value of the header `Prime-Body` for a body."""
    claim = BodyClaim(
        run=run,
        action=action,
        nonce=nonce,
        issued_at_ms=now_ms,
        epoch=epoch,
        body_digest=digest_of(body),
        body_bytes=len(body),
    )
    return seal(claim, PayloadType.BODY_CLAIM, key).to_bytes().decode()


def open_claim(header: str) -> Envelope:
    """Open the envelope in the header `Prime-Body`. Nothing is trusted yet. Raises RemoteError."""
    data = header.encode("utf-8", "replace")
    if len(data) > limits.HEADER_ENVELOPE_BYTES_MAX:
        raise LimitExceeded("HEADER_ENVELOPE_BYTES_MAX", len(data), limits.HEADER_ENVELOPE_BYTES_MAX)
    return open_envelope(data)


def read_claim(envelope: Envelope, signer: str, *, action: str, body_bytes: int) -> BodyClaim:
    """Return the claim after checking its signature, endpoint and length. Raises RemoteError."""
    return parse_claim(envelope.verify(PayloadType.BODY_CLAIM, trusted=(signer,)), action=action, body_bytes=body_bytes)


def parse_claim(payload: bytes, *, action: str, body_bytes: int, is_json: bool = False) -> BodyClaim:
    """Return the claim in a verified payload, after checking its endpoint and length. Raises RemoteError.

    `is_json`: as in `parse_json`.
    """
    claim = parse_json(payload, BodyClaim, is_json=is_json)
    if claim.action != action:
        raise RemoteError(
            ErrorCode.MALFORMED, f"the header {CLAIM_HEADER} is for /v1/{claim.action}, not for this path"
        )
    if claim.body_bytes != body_bytes:
        raise RemoteError(
            ErrorCode.MALFORMED, f"the header {CLAIM_HEADER} says {claim.body_bytes} bytes, Content-Length {body_bytes}"
        )
    return claim
