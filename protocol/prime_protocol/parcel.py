"""A parcel: a signed header in front of a raw body, so that large bodies need no base64.

    b"PRP1" | u32 big endian: bytes of the envelope | the DSSE envelope (JSON) of the header | the body to the end

The header is a WireModel with the two fields of `ParcelHeader`; they bind the body to the signature.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from prime_protocol import limits
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, open_envelope, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import SigningKey

MAGIC = b"PRP1"
_PREFIX_BYTES = len(MAGIC) + 4
# Base64 makes the envelope a third larger than its payload; signatures and names add to that.
_ENVELOPE_BYTES_MAX = limits.PARCEL_HEADER_BYTES_MAX * 3 // 2 + 4_096
PARCEL_OVERHEAD_BYTES_MAX = _PREFIX_BYTES + _ENVELOPE_BYTES_MAX
"""Maximum size of a parcel beyond its body."""


class ParcelHeader(WireModel):
    """Fields of every parcel's header that describe its body."""

    body_digest: Digest
    """Digest of the body as it is on the wire."""
    body_bytes: int = Field(ge=0, le=limits.COUNT_MAX)
    """Length of the body."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Opened parcel: framing and size have been checked, nothing else."""

    envelope: Envelope
    body: memoryview

    def check_body(self, header: ParcelHeader) -> memoryview:
        """Return the body if the (verified) header names it. Raises RemoteError(DIGEST_MISMATCH)."""
        if len(self.body) != header.body_bytes or digest_of(self.body) != header.body_digest:
            raise RemoteError(ErrorCode.DIGEST_MISMATCH, "the parcel's body does not match its signed header")
        return self.body


def pack_parcel(header: ParcelHeader, body: bytes, payload_type: PayloadType, key: SigningKey) -> bytes:
    """Sign a header and put it before its body.

    Example: pack_parcel(BlobHeader(run=..., body_digest=digest_of(b), body_bytes=len(b), ...), b, PayloadType.BLOB,
    key).
    """
    assert header.body_bytes == len(body)
    envelope = seal(header, payload_type, key).to_bytes()
    return MAGIC + len(envelope).to_bytes(4, "big") + envelope + body


def open_parcel(data: bytes, *, body_bytes_max: int) -> Parcel:
    """Split a parcel into envelope and body. Raises RemoteError."""
    view = memoryview(data)
    if len(view) < _PREFIX_BYTES or view[: len(MAGIC)] != MAGIC:
        raise RemoteError(ErrorCode.MALFORMED, "not a parcel: it does not begin with PRP1")
    envelope_bytes = int.from_bytes(view[len(MAGIC) : _PREFIX_BYTES], "big")
    if envelope_bytes > _ENVELOPE_BYTES_MAX:
        raise LimitExceeded("parcel_envelope_bytes_max", envelope_bytes, _ENVELOPE_BYTES_MAX)
    body = view[_PREFIX_BYTES + envelope_bytes :]
    if len(view) < _PREFIX_BYTES + envelope_bytes:
        raise RemoteError(ErrorCode.MALFORMED, "the parcel ends inside its header")
    if len(body) > body_bytes_max:
        raise LimitExceeded("body_bytes_max", len(body), body_bytes_max)
    envelope = open_envelope(bytes(view[_PREFIX_BYTES : _PREFIX_BYTES + envelope_bytes]), bytes_max=_ENVELOPE_BYTES_MAX)
    if len(envelope.payload) > limits.PARCEL_HEADER_BYTES_MAX:
        raise LimitExceeded("PARCEL_HEADER_BYTES_MAX", len(envelope.payload), limits.PARCEL_HEADER_BYTES_MAX)
    return Parcel(envelope, body)
