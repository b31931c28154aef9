"""DSSE envelopes: verified before they are parsed (https://github.com/secure-systems-lab/dsse, protocol.md v1.0.2).

The signed bytes are PAE(type, payload) = "DSSEv1" SP len(type) SP type SP len(payload) SP payload, over the raw payload
bytes. The receiver parses exactly the bytes that were signed, so the protocol needs no canonical JSON.

On the wire an envelope is JSON: {"payload": base64, "payloadType": "...", "signatures": [{"keyid": peer id, "sig":
base64}]}.

Every message passes these stages: bytes -> Envelope (framing and size) -> verify (signature over raw bytes) -> payload
bytes -> `parse_json` (schema, then bounds).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import to_json

from prime_protocol import limits
from prime_protocol.constraints import refuse_dropped
from prime_protocol.digest import digest_of
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.identity import PublicKey, SigningKey


class PayloadType(StrEnum):
    """Kind of a signed payload. The signature covers the type, so no message can pass for another kind."""

    RUN_SPEC = "application/vnd.prime.run-spec+json"
    MANIFEST = "application/vnd.prime.manifest+json"
    REQUEST = "application/vnd.prime.request+json"
    LEASE = "application/vnd.prime.lease+json"
    ROLLOUT = "application/vnd.prime.rollout-header+json"
    BLOB = "application/vnd.prime.blob-header+json"
    RECEIPT = "application/vnd.prime.receipt+json"
    BATCH = "application/vnd.prime.batch+json"
    KEY_RING = "application/vnd.prime.key-ring+json"
    TIMESTAMP = "application/vnd.prime.timestamp+json"
    INVITE = "application/vnd.prime.invite+json"
    LEDGER_HEAD = "application/vnd.prime.ledger-head+json"
    BAN = "application/vnd.prime.ban+json"
    PEER_LIST = "application/vnd.prime.peer-list+json"
    PEER_TICKET = "application/vnd.prime.peer-ticket+json"
    PEER_TOKEN = "application/vnd.prime.peer-token+json"
    PEER_ANSWER = "application/vnd.prime.peer-answer+json"
    LOGPROBS = "application/vnd.prime.logprobs-header+json"
    CALIBRATION = "application/vnd.prime.calibration+json"
    BODY_CLAIM = "application/vnd.prime.body-claim+json"
    DELEGATION = "application/vnd.prime.delegation+json"


class WireModel(BaseModel):
    """Base of every message on the wire: immutable; an unknown field is an error.

    Creating a subclass raises TypeError if its validator would drop a constraint that a field declares.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_on_complete__(cls) -> None:
        refuse_dropped(cls)


Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Signature:
    """Signature of an envelope, with the id of the key that claims to have made it."""

    key_id: str
    signature: bytes


@dataclass(frozen=True, slots=True)
class Envelope:
    """Payload with its signatures, not verified yet. Do not read `payload` before `verify` has returned."""

    payload_type: str
    payload: bytes
    signatures: tuple[Signature, ...]

    def verify(self, payload_type: PayloadType, *, trusted: Collection[str], threshold: int = 1) -> bytes:
        """Return the payload once `threshold` different keys of `trusted` (key ids) are found to sign it.

        Raises RemoteError: WRONG_PAYLOAD_TYPE, or BAD_SIGNATURE if too few trusted keys signed. As DSSE asks, signatures
        by untrusted keys are ignored, and a key that signs twice counts once. This is stricter than DSSE: an invalid
        signature that claims a trusted key is an error even if enough others verify.
        """
        if self.payload_type != payload_type:
            raise RemoteError(ErrorCode.WRONG_PAYLOAD_TYPE, f"expected {payload_type}, got {self.payload_type[:100]}")
        message = pre_authentication_encoding(self.payload_type, self.payload)
        signers = set()
        for signature in self.signatures:
            if signature.key_id in trusted:
                PublicKey.from_key_id(signature.key_id).verify(signature.signature, message)
                signers.add(signature.key_id)
        if len(signers) < threshold:
            raise RemoteError(ErrorCode.BAD_SIGNATURE, f"{len(signers)} trusted signatures, {threshold} needed")
        return self.payload

    def sole_signer(self) -> str:
        """Return the key id that claims to have signed; exactly one is allowed. It is still unverified."""
        if len(self.signatures) != 1:
            raise RemoteError(ErrorCode.BAD_SIGNATURE, f"exactly one signature expected, got {len(self.signatures)}")
        return self.signatures[0].key_id

    def to_bytes(self) -> bytes:
        """Serialise to JSON, as on the wire."""
        return to_json(
            {
                "payload": base64.b64encode(self.payload).decode(),
                "payloadType": self.payload_type,
                "signatures": [
                    {"keyid": s.key_id, "sig": base64.b64encode(s.signature).decode()} for s in self.signatures
                ],
            }
        )

    def to_base64(self) -> str:
        """Return the envelope as URL-safe base64, as people copy it from one machine to another."""
        return base64.urlsafe_b64encode(self.to_bytes()).decode()

    @property
    def digest(self) -> str:
        """Digest of the payload. It identifies the signed statement, independent of its signers."""
        return digest_of(self.payload)


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """Return the bytes that a signature covers (DSSE's PAE)."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def seal(payload: BaseModel | bytes, payload_type: PayloadType, *keys: SigningKey) -> Envelope:
    """Sign a payload with one key or several."""
    assert keys
    raw = payload if isinstance(payload, bytes) else payload.model_dump_json().encode()
    message = pre_authentication_encoding(payload_type, raw)
    return Envelope(payload_type, raw, tuple(Signature(key.key_id, key.sign(message)) for key in keys))


def open_envelope(data: bytes, *, bytes_max: int = limits.ENVELOPE_BYTES_MAX, unsigned: bool = False) -> Envelope:
    """Parse an envelope: framing and size only, so nothing is trusted afterwards. Raises RemoteError.

    `unsigned` allows an envelope without signatures: a signing request that passes from one root key's machine to the
    next.
    """
    if len(data) > bytes_max:
        raise LimitExceeded("envelope_bytes_max", len(data), bytes_max)
    marks = sum(map(data.count, (b"{", b"[", b",")))
    if marks > limits.ENVELOPE_MARKS_MAX:  # as values in memory they take up to thirty times their bytes
        raise LimitExceeded("ENVELOPE_MARKS_MAX", marks, limits.ENVELOPE_MARKS_MAX)
    fields = load_json(data)
    if not isinstance(fields, dict):
        raise RemoteError(ErrorCode.MALFORMED, "an envelope is a JSON object")
    unknown = fields.keys() - {"payload", "payloadType", "signatures"}
    if unknown:
        raise RemoteError(ErrorCode.UNKNOWN_FIELD, f"envelope has unknown field {min(unknown)[:100]!r}")
    payload, payload_type, signatures = (fields.get(name) for name in ("payload", "payloadType", "signatures"))
    if not isinstance(payload_type, str) or not isinstance(signatures, list) or not (signatures or unsigned):
        raise RemoteError(ErrorCode.WRONG_TYPE, "envelope needs payload, payloadType and signatures")
    if len(signatures) > limits.SIGNATURES_MAX:
        raise LimitExceeded("SIGNATURES_MAX", len(signatures), limits.SIGNATURES_MAX)
    return Envelope(payload_type, _base64(payload, "payload"), tuple(_signature(item) for item in signatures))


def open_base64(text: str, what: str) -> Envelope:
    """Parse an envelope that people pass on as URL-safe base64. Raises RemoteError; `what` names it to its owner."""
    try:
        data = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
    except ValueError:  # binascii.Error and UnicodeEncodeError are ValueErrors
        raise RemoteError(ErrorCode.MALFORMED, f"{what} is base64; copy it whole") from None
    return open_envelope(data)


def load_json(data: bytes) -> Any:
    """Parse JSON strictly by RFC 8259 and I-JSON (RFC 7493). Raises RemoteError(MALFORMED or TOO_LARGE).

    Requires UTF-8 without a byte order mark. Rejects duplicate keys, NaN, numbers that overflow a float64, lone
    surrogates, and nesting deeper than JSON_DEPTH_MAX. Python's own parser accepts all of these.
    """
    _check_depth(data)
    try:
        value = _DECODER.decode(data.decode())  # Given bytes, the decoder would also try UTF-16 and UTF-32.
        if _SURROGATE_ESCAPE.search(data):
            json.dumps(value, ensure_ascii=False).encode()  # raises UnicodeEncodeError for a lone surrogate
    except (ValueError, RecursionError) as error:  # ValueError: JSONDecodeError, UnicodeError, integers of 4,300 digits
        reason = str(error).partition(";")[0][:200]
        raise RemoteError(ErrorCode.MALFORMED, f"not valid JSON: {reason}") from None
    return value


def parse_json(payload: bytes, model: type[Model], *, is_json: bool = False) -> Model:
    """Parse a verified payload as a typed message. Raises RemoteError with the location and kind of the first fault.

    `is_json`: `load_json` has accepted these bytes before, perhaps at a gateway.
    """
    if not is_json:
        load_json(payload)  # pydantic's parser accepts duplicate keys; load_json rejects them
    try:
        return model.model_validate_json(payload)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join((model.__name__, *map(str, fault["loc"])))[:200]
        code = _CODE_OF_FAULT.get(fault["type"], ErrorCode.WRONG_TYPE)
        raise RemoteError(code, f"{place}: {fault['msg'][:300]}") from None


_CODE_OF_FAULT = {"extra_forbidden": ErrorCode.UNKNOWN_FIELD, "json_invalid": ErrorCode.MALFORMED}


def _signature(item: object) -> Signature:
    if not isinstance(item, dict) or item.keys() != {"keyid", "sig"} or not isinstance(item["keyid"], str):
        raise RemoteError(ErrorCode.WRONG_TYPE, "a signature has exactly keyid and sig")
    if len(item["keyid"]) > limits.NAME_CHARS_MAX:
        raise LimitExceeded("NAME_CHARS_MAX", len(item["keyid"]), limits.NAME_CHARS_MAX)
    return Signature(item["keyid"], _base64(item["sig"], "sig"))


def _base64(value: object, name: str) -> bytes:
    """Decode padded base64 of the standard alphabet. Reject other encodings of the same bytes: the unused last bits are zero."""
    if not isinstance(value, str):
        raise RemoteError(ErrorCode.WRONG_TYPE, f"{name} is a base64 string")
    try:
        text = value.encode("ascii")
        data = base64.b64decode(text, validate=True)
    except ValueError:  # binascii.Error and UnicodeEncodeError are ValueErrors
        data = None
    if data is None or base64.b64encode(data) != text:
        raise RemoteError(ErrorCode.MALFORMED, f"{name} is not canonical base64")
    return data


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key in an object")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not isfinite(value):
        raise ValueError(f"{digits[:40]} is out of range")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite)


def _check_depth(data: bytes) -> None:
    """Bound the nesting depth before a recursive parser reads the data."""
    if data.count(b"[") + data.count(b"{") <= limits.JSON_DEPTH_MAX:
        return
    steps = _STRING.sub(b"", data).translate(_BRACKET_STEPS, _NOT_BRACKETS)
    depth = int(np.frombuffer(steps, np.int8).cumsum(dtype=np.int32).max(initial=0))
    if depth > limits.JSON_DEPTH_MAX:
        raise LimitExceeded("JSON_DEPTH_MAX", depth, limits.JSON_DEPTH_MAX)


# The closing quote is optional. Otherwise the regex would scan an unclosed string again from each of its quotes.
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BRACKET_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # +1 and -1 as int8
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
