"""DSSE envelopes: verified before they are parsed (https://github.com/secure-systems-lab/dsse, protocol.md v1.0.2).

What is signed is PAE(type, payload) = "DSSEv1" SP len(type) SP type SP len(payload) SP payload, over the raw payload
bytes. So no canonical JSON is needed: the bytes that were signed are the bytes that are parsed.

On the wire an envelope is JSON: {"payload": base64, "payloadType": "...", "signatures": [{"keyid": peer id, "sig": base64}]}.

The path of every message: bytes -> Envelope (framing and size) -> verify (signature over raw bytes) -> payload bytes ->
`parse_json` (schema, then bounds).
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from prime_protocol import limits
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, LimitExceeded, PeerError
from prime_protocol.identity import PublicKey, SigningKey


class PayloadType(StrEnum):
    """The kinds of signed payload. The type is inside the signature, so no message can pass for another kind."""

    RUN_SPEC = "application/vnd.prime.run-spec+json"
    MANIFEST = "application/vnd.prime.manifest+json"
    REQUEST = "application/vnd.prime.request+json"
    LEASE = "application/vnd.prime.lease+json"
    ROLLOUT = "application/vnd.prime.rollout-header+json"
    BLOB = "application/vnd.prime.blob-header+json"
    RECEIPT = "application/vnd.prime.receipt+json"
    BATCH = "application/vnd.prime.batch+json"


class WireModel(BaseModel):
    """Base of everything that crosses the wire: immutable, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Signature:
    key_id: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """A payload with its signatures, not verified yet. `payload` is not to be read before `verify` returned."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...]

    def verify(self, payload_type: PayloadType, *, trusted: Collection[str], threshold: int = 1) -> bytes:
        """The payload, after `threshold` different keys of `trusted` (key ids) have been found to sign it.

        Raises PeerError: WRONG_PAYLOAD_TYPE, or BAD_SIGNATURE where too few trusted keys signed. Signatures by keys
        that are not trusted are ignored, as DSSE asks; a signature that claims a trusted key and fails is an error.
        """
        if self.payload_type != payload_type:
            raise PeerError(ErrorCode.WRONG_PAYLOAD_TYPE, f"expected {payload_type}, got {self.payload_type[:100]}")
        message = pre_authentication_encoding(self.payload_type, self.payload)
        signers = set()
        for signature in self.signatures:
            if signature.key_id in trusted:
                PublicKey.from_key_id(signature.key_id).verify(signature.signature, message)
                signers.add(signature.key_id)
        if len(signers) < threshold:
            raise PeerError(ErrorCode.BAD_SIGNATURE, f"{len(signers)} trusted signatures, {threshold} needed")
        return self.payload

    def sole_signer(self) -> str:
        """The key id that claims to have signed, where exactly one is allowed. Still unverified."""
        if len(self.signatures) != 1:
            raise PeerError(ErrorCode.BAD_SIGNATURE, f"exactly one signature expected, got {len(self.signatures)}")
        return self.signatures[0].key_id

    def to_bytes(self) -> bytes:
        return json.dumps(
            {
                "payload": base64.b64encode(self.payload).decode(),
                "payloadType": self.payload_type,
                "signatures": [
                    {"keyid": s.key_id, "sig": base64.b64encode(s.signature).decode()} for s in self.signatures
                ],
            },
            separators=(",", ":"),
        ).encode()

    @property
    def digest(self) -> str:
        """Digest of the payload. It names the signed statement, whoever else signs it too."""
        return digest_of(self.payload)


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def seal(payload: BaseModel | bytes, payload_type: PayloadType, *keys: SigningKey) -> Envelope:
    """Sign a payload with one key or several."""
    raw = payload if isinstance(payload, bytes) else payload.model_dump_json().encode()
    message = pre_authentication_encoding(payload_type, raw)
    return Envelope(payload_type, raw, tuple(Signature(key.key_id, key.sign(message)) for key in keys))


def open_envelope(data: bytes, *, bytes_max: int = limits.ENVELOPE_BYTES_MAX) -> Envelope:
    """Framing and size only; nothing is trusted afterwards. Raises PeerError."""
    if len(data) > bytes_max:
        raise LimitExceeded("envelope_bytes_max", len(data), bytes_max)
    fields = load_json(data)
    if not isinstance(fields, dict):
        raise PeerError(ErrorCode.MALFORMED, "an envelope is a JSON object")
    unknown = fields.keys() - {"payload", "payloadType", "signatures"}
    if unknown:
        raise PeerError(ErrorCode.UNKNOWN_FIELD, f"envelope has unknown field {min(unknown)[:100]!r}")
    payload, payload_type, signatures = (fields.get(name) for name in ("payload", "payloadType", "signatures"))
    if not isinstance(payload_type, str) or not isinstance(signatures, list):
        raise PeerError(ErrorCode.WRONG_TYPE, "envelope needs payload, payloadType and signatures")
    if not 1 <= len(signatures) <= limits.SIGNATURES_MAX:
        raise LimitExceeded("SIGNATURES_MAX", len(signatures), limits.SIGNATURES_MAX)
    parsed = []
    for item in signatures:
        if not isinstance(item, dict) or item.keys() != {"keyid", "sig"} or not isinstance(item["keyid"], str):
            raise PeerError(ErrorCode.WRONG_TYPE, "a signature has exactly keyid and sig")
        parsed.append(Signature(item["keyid"], _base64(item["sig"], "sig")))
    return Envelope(payload_type, _base64(payload, "payload"), tuple(parsed))


def load_json(data: bytes) -> Any:
    """JSON as RFC 8259 means it: no duplicate keys, no NaN, bounded depth. Raises PeerError(MALFORMED or TOO_LARGE)."""
    _check_depth(data)
    try:
        return json.loads(data, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError covers JSONDecodeError, UnicodeDecodeError and huge ints
        raise PeerError(ErrorCode.MALFORMED, f"not valid JSON: {str(error)[:200]}") from None


def parse_json(payload: bytes, model: type[Model]) -> Model:
    """A verified payload as a typed message. Raises PeerError with the first fault's place and nature."""
    load_json(payload)  # pydantic's parser accepts duplicate keys; this one does not
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])[:200]
        code = ErrorCode.UNKNOWN_FIELD if fault["type"] == "extra_forbidden" else ErrorCode.WRONG_TYPE
        raise PeerError(code, f"{model.__name__}.{place}: {fault['msg'][:300]}") from None


def _base64(value: object, name: str) -> bytes:
    if not isinstance(value, str):
        raise PeerError(ErrorCode.WRONG_TYPE, f"{name} is a base64 string")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise PeerError(ErrorCode.MALFORMED, f"{name} is not base64") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key in an object")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _check_depth(data: bytes) -> None:
    """Bound the nesting before a recursive parser sees it."""
    depth = 0
    for byte in _STRING.sub(b"", data).translate(None, _NOT_BRACKETS):
        depth += 1 if byte in b"[{" else -1
        if depth > limits.JSON_DEPTH_MAX:
            raise LimitExceeded("JSON_DEPTH_MAX", depth, limits.JSON_DEPTH_MAX)


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
