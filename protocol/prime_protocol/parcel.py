"""A parcel: a signed header in front of a raw body, so that large bodies need no base64.

    b"PRP1" | u32 big endian: bytes of the envelope | the DSSE envelope (JSON) of the header | the body to the end

The header is a WireModel with the two fields of `ParcelHeader`; they bind the body to the signature.

In a validator's parcel the header (LogprobsHeader) names a bundle, and the body is the T logprobs in the bundle's order, as
little-endian float32, 4 bytes a token. The trainer uses them instead of the claimed ones. The bundle stays as its worker signed
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import Field

from prime_protocol import limits
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import Envelope, PayloadType, WireModel, open_envelope, parse_json, seal
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyChain, Role

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


class LogprobsHeader(ParcelHeader):
    """Signed header (envelope type LOGPROBS)."""

    run: Digest
    bundle: Digest
    """Digest of the bundle that they belong to."""
    num_tokens: int = Field(ge=1, le=limits.COUNT_MAX)


def pack_logprobs(logprobs_T: npt.NDArray[np.float32], *, run: str, bundle: str, key: SigningKey) -> bytes:
    """Pack finite logprobs [T] in nats into a parcel."""
    body = np.minimum(logprobs_T, 0.0).astype("<f4").tobytes()
    header = LogprobsHeader(
        body_digest=digest_of(body), body_bytes=len(body), run=run, bundle=bundle, num_tokens=len(logprobs_T)
    )
    return pack_parcel(header, body, PayloadType.LOGPROBS, key)


def open_logprobs(
    parcel: bytes, *, run: str, keys: KeyChain, bytes_max: int, bundle: str | None = None, num_tokens: int | None = None
) -> tuple[LogprobsHeader, npt.NDArray[np.float32]]:
    """Return the header and the logprobs [T], signed by any current or former validator key. `bytes_max` limits the body.

    `bundle` and `num_tokens` are the expected values, if known. Raises RemoteError.
    """
    opened = open_parcel(parcel, body_bytes_max=bytes_max)
    header = parse_json(keys.verify_kept(opened.envelope, PayloadType.LOGPROBS, Role.VALIDATOR), LogprobsHeader)
    if header.run != run:
        raise RemoteError(ErrorCode.WRONG_RUN, f"the logprobs belong to run {header.run[:12]}, not {run[:12]}")
    if bundle is not None and header.bundle != bundle:
        raise RemoteError(ErrorCode.MALFORMED, f"the logprobs belong to bundle {header.bundle[:12]}, not {bundle[:12]}")
    if header.num_tokens != (header.num_tokens if num_tokens is None else num_tokens):
        raise RemoteError(ErrorCode.MALFORMED, f"{header.num_tokens} logprobs for a bundle of {num_tokens} tokens")
    if header.body_bytes != 4 * header.num_tokens:
        raise RemoteError(ErrorCode.MALFORMED, f"{header.num_tokens} logprobs in {header.body_bytes} bytes")
    logprobs_T = np.frombuffer(opened.check_body(header), "<f4").astype(np.float32)
    if not (np.isfinite(logprobs_T) & (logprobs_T <= 0.0)).all():
        raise RemoteError(ErrorCode.MALFORMED, "a logprob is not finite, or above 0")
    return header, logprobs_T
