"""Frames of the link, each with a code of authentication, after a handshake that proves the shared secret to both sides.

    writer -> gateway   MAGIC | nonce of 32 bytes
    gateway -> writer   nonce of 32 bytes | proof of 32 bytes
    writer -> gateway   proof of 32 bytes
    both                u32 length of what follows | code of 16 bytes | u8 kind | u64 call | u32 length of head | head | body

A proof is the keyed BLAKE3 of a label, both nonces and the run under the secret; each direction's key is another one. A code
covers the number of its frame too, so none can be repeated, left out or put in another order. Heads are JSON. Nothing is
encrypted: the link belongs into a network of the operator's own.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from blake3 import blake3

from prime_protocol.errors import ErrorCode, LocalError, RemoteError

MAGIC = b"prime gateway 1\n"
NONCE_BYTES, PROOF_BYTES, CODE_BYTES = 32, 32, 16
FRAME_BYTES_MAX = 2**31 + 2**24
"""A body that a gateway forwards whole is the longest. Gateways bound their bodies by the run's limits."""
_HEAD = 1 + 8 + 4


class FrameKind(IntEnum):
    """Kinds of frames."""

    CALL = 1
    ANSWER = 2
    """The whole answer, or its head with `streams`; then pieces follow."""
    FAULT = 3
    """The call has failed, or its stream breaks off."""
    PIECE = 4
    END = 5
    MORE = 6
    """The gateway has room for another piece."""
    STOP = 7
    """The stream has no reader any more."""
    ALIVE = 8
    WANT = 9
    """The writer takes the parcel that the gateway holds for a call."""
    GIVEN = 10
    """The parcel is stored, or it follows; or the head has the fault."""


class BrokenLink(Exception):
    """The other side does not know the secret, or what it sends is no frame."""


@dataclass(frozen=True, slots=True)
class LinkFrame:
    """One frame."""

    kind: FrameKind
    call: int = 0
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""


def proof(secret: bytes, label: str, nonces: bytes, run: str) -> bytes:
    """Return what proves the secret, or a key that only those who know it can derive."""
    return bytes(blake3(label.encode() + b"\x00" + nonces + run.encode(), key=secret).digest())


def is_proof(given: bytes, secret: bytes, label: str, nonces: bytes, run: str) -> bool:
    """Return whether a proof is right, in constant time."""
    return hmac.compare_digest(given, proof(secret, label, nonces, run))


class FrameSealer:
    """The frames of one direction, to be sent."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def seal(self, frame: LinkFrame) -> bytes:
        """Return a frame's bytes. Raises LocalError if it is too long."""
        head = json.dumps(frame.head, separators=(",", ":")).encode() if frame.head else b""
        inner = b"".join(
            (bytes((frame.kind,)), frame.call.to_bytes(8, "big"), len(head).to_bytes(4, "big"), head, frame.body)
        )
        if len(inner) > FRAME_BYTES_MAX:
            raise LocalError(f"a frame of {len(inner)} bytes is too long for the link of a gateway")
        code = _code(self._key, self._number, inner)
        self._number += 1
        return (CODE_BYTES + len(inner)).to_bytes(4, "big") + code + inner


class FrameOpener:
    """The frames of one direction, as they are received."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number, self._held = key, 0, bytearray()

    def feed(self, data: bytes) -> Iterator[LinkFrame]:
        """Yield the frames that are complete. Raises BrokenLink."""
        self._held += data
        start = 0
        while len(self._held) - start >= 4:
            length = int.from_bytes(self._held[start : start + 4], "big")
            if not CODE_BYTES + _HEAD <= length <= CODE_BYTES + FRAME_BYTES_MAX:
                raise BrokenLink("a frame of an impossible length")
            if len(self._held) - start < 4 + length:
                break
            yield self._open(bytes(memoryview(self._held)[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._held[:start]

    def _open(self, data: bytes) -> LinkFrame:
        code, inner = data[:CODE_BYTES], data[CODE_BYTES:]
        if not hmac.compare_digest(code, _code(self._key, self._number, inner)):
            raise BrokenLink("a frame whose code is wrong")
        self._number += 1
        end = _HEAD + int.from_bytes(inner[9:13], "big")
        head = json.loads(inner[_HEAD:end]) if end > _HEAD else {}
        try:
            return LinkFrame(FrameKind(inner[0]), int.from_bytes(inner[1:9], "big"), head, inner[end:])
        except ValueError:
            raise BrokenLink(f"a frame of a kind, {inner[0]}, that this release does not know") from None


def _code(key: bytes, number: int, inner: bytes) -> bytes:
    return bytes(blake3(number.to_bytes(8, "big") + inner, key=key).digest(CODE_BYTES))


def fault_head(error: RemoteError) -> dict[str, object]:
    """Return the head of an error's frame."""
    return {
        "code": str(error.code),
        "detail": error.detail,
        "retry_after_s": error.retry_after_s,
        "epoch": error.epoch,
    }


def fault_of(frame: LinkFrame) -> RemoteError:
    """Return the error in a frame."""
    head = frame.head
    is_known = head["code"] in set(ErrorCode)
    return RemoteError(
        ErrorCode(head["code"]) if is_known else ErrorCode.INTERNAL,  # else the coordinator's is a newer release
        head["detail"],
        retry_after_s=head.get("retry_after_s"),
        epoch=head.get("epoch") or "",
    )
