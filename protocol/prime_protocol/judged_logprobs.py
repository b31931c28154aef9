"""Logprobs that a validator computed for a bundle; the trainer uses them instead of the claimed ones.

A parcel by a validator. Its header (LogprobsHeader) names the bundle. Its body is the T logprobs in the bundle's order,
as little-endian float32, 4 bytes a token. The bundle itself stays as its worker signed it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from prime_protocol import limits
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import PayloadType, parse_json
from prime_protocol.errors import ErrorCode, RemoteError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyChain, Role
from prime_protocol.parcel import ParcelHeader, open_parcel, pack_parcel


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
