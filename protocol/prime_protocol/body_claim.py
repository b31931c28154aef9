"""What a signer says of a request's body before the body is read. SPEC.md, section "HTTP".

A server must not hold a stranger's bytes in the share of those who take part. So a signed request travels in the header
`Prime-Request`, where it needs no body. Whatever has a body announces it in the header `Prime-Body`: an envelope around a
`BodyClaim`, which binds the signer to this endpoint, this length and these bytes.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from prime_protocol import limits
from prime_protocol.assignment import Count
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.messages import Epoch, Nonce

REQUEST_HEADER = "Prime-Request"
"""The header that holds a whole signed request: its envelope, as JSON text."""
CLAIM_HEADER = "Prime-Body"
"""The header that announces a body: the envelope of a BodyClaim, as JSON text."""


class BodyClaim(WireModel):
    """Sent before a body, by the body's sender (envelope type BODY_CLAIM)."""

    run: Digest
    action: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$", max_length=32)]
    """The endpoint: what follows /v1/ in its path."""
    nonce: Nonce
    issued_at_ms: Count
    epoch: Epoch = ""
    """The server's, as in a stamped request."""
    body_digest: Digest
    body_bytes: int = Field(ge=1, le=limits.COUNT_MAX)


def claim_of(body: bytes, key: SigningKey, *, run: str, action: str, nonce: str, now_ms: int, epoch: str = "") -> str:
    """The value of the header `Prime-Body` for a body."""
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
    """The envelope in the header `Prime-Body`. Nothing is trusted yet. Raises PeerError."""
    data = header.encode("utf-8", "replace")
    if len(data) > limits.HEADER_ENVELOPE_BYTES_MAX:
        raise LimitExceeded("HEADER_ENVELOPE_BYTES_MAX", len(data), limits.HEADER_ENVELOPE_BYTES_MAX)
    return open_envelope(data)


def read_claim(envelope: Envelope, signer: str, *, action: str, body_bytes: int) -> BodyClaim:
    """The claim, after its signature, its endpoint and its length have been checked. Raises PeerError."""
    claim = parse_json(envelope.verify(PayloadType.BODY_CLAIM, trusted=(signer,)), BodyClaim)
    if claim.action != action:
        raise PeerError(ErrorCode.MALFORMED, f"the header {CLAIM_HEADER} is for /v1/{claim.action}, not for this path")
    if claim.body_bytes != body_bytes:
        raise PeerError(
            ErrorCode.MALFORMED, f"the header {CLAIM_HEADER} says {claim.body_bytes} bytes, Content-Length {body_bytes}"
        )
    return claim
