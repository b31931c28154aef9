"""The logprobs that a validator computed for a bundle: what the trainer uses in the place of the claimed ones.

A parcel by a validator: its header (LogprobsHeader) names the bundle, its body is the T logprobs as float32, little endian, one
after another in the bundle's order, 4 bytes a token. The bundle stays as its worker signed it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from prime_protocol import limits
from prime_protocol.digest import Digest, digest_of
from prime_protocol.envelope import PayloadType, parse_json
from prime_protocol.errors import ErrorCode, PeerError
from prime_protocol.identity import SigningKey
from prime_protocol.key_ring import KeyChain, Role
from prime_protocol.parcel import ParcelHeader, open_parcel, pack_parcel


class LogprobsHeader(ParcelHeader):
    """The signed header (envelope type LOGPROBS)."""

    run: Digest
    bundle: Digest
    """Digest of the bundle that they are of."""
    num_tokens: int = Field(ge=1, le=limits.COUNT_MAX)


def pack_logprobs(logprobs_T: npt.NDArray[np.float32], *, run: str, bundle: str, key: SigningKey) -> bytes:
    """The parcel of finite logprobs [T], nats."""
    body = np.minimum(logprobs_T, 0.0).astype("<f4").tobytes()
    header = LogprobsHeader(
        body_digest=digest_of(body), body_bytes=len(body), run=run, bundle=bundle, num_tokens=len(logprobs_T)
    )
    return pack_parcel(header, body, PayloadType.LOGPROBS, key)


def open_logprobs(
    parcel: bytes, *, run: str, keys: KeyChain, bytes_max: int, bundle: str | None = None, num_tokens: int | None = None
) -> tuple[LogprobsHeader, npt.NDArray[np.float32]]:
    """The header and the logprobs [T], by any key that ever was a validator's. `bytes_max`: of the body.

    `bundle`, `num_tokens`: what they must be of, where that is known. Raises PeerError.
    """
    opened = open_parcel(parcel, body_bytes_max=bytes_max)
    header = parse_json(keys.verify_kept(opened.envelope, PayloadType.LOGPROBS, Role.VALIDATOR), LogprobsHeader)
    if header.run != run:
        raise PeerError(ErrorCode.WRONG_RUN, f"logprobs of run {header.run[:12]}, not {run[:12]}")
    if bundle is not None and header.bundle != bundle:
        raise PeerError(ErrorCode.MALFORMED, f"logprobs of bundle {header.bundle[:12]}, not {bundle[:12]}")
    if header.num_tokens != (header.num_tokens if num_tokens is None else num_tokens):
        raise PeerError(ErrorCode.MALFORMED, f"{header.num_tokens} logprobs of a bundle of {num_tokens} tokens")
    if header.body_bytes != 4 * header.num_tokens:
        raise PeerError(ErrorCode.MALFORMED, f"{header.num_tokens} logprobs in {header.body_bytes} bytes")
    logprobs_T = np.frombuffer(opened.check_body(header), "<f4").astype(np.float32)
    if not (np.isfinite(logprobs_T) & (logprobs_T <= 0.0)).all():
        raise PeerError(ErrorCode.MALFORMED, "a logprob is not finite, or above 0")
    return header, logprobs_T
