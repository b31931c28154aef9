"""Frames of the link, each with a code of authentication, after a handshake that proves the shared secret to both sides.

    writer -> gateway   MAGIC | nonce of 32 bytes
    gateway -> writer   nonce of 32 bytes | proof of 32 bytes
    writer -> gateway   proof of 32 bytes
    both                packets: u32 length of the second code and the frames | code of 8 bytes over the length
                        | code of 16 bytes over the frames | frames
                        a frame: u8 kind | u64 call | u32 length of head | u32 length of body | head | body

A proof is the keyed BLAKE3 of a label, both nonces and the run under the secret; each direction's key is another one. A code
covers the number of its packet too, so none can be repeated, left out or put in another order. The length has a code of its
own: a changed one would be waited for, while signs of life arrive. Heads are JSON. Nothing is encrypted: the link belongs into
a network of the operator's own.
"""

from __future__ import annotations

import hmac
import json
import struct
from collections.abc import Iterator
from dataclasses import field
from enum import IntEnum
from typing import Any

from blake3 import blake3
from pydantic_core import to_json

from prime_node.carrier import carrier
from prime_protocol.errors import LocalError

MAGIC = b"prime gateway 2\n"
NONCE_BYTES, PROOF_BYTES, CODE_BYTES, LENGTH_CODE_BYTES = 32, 32, 16, 8
PACKET_BYTES_MAX = 2**31 + 2**24
"""A body that a gateway forwards whole is the longest. Gateways bound their bodies by the run's limits."""
LARGE_BYTES = 2**16
"""Length from which a body is sent by itself."""
TOGETHER_BYTES_MAX = 2**20
"""Longest packet of several frames. All of them are taken in one turn of the loop."""
HEAD_BYTES_MAX = 2**17
"""Length of a frame's head: that of a request's header, and its characters may be escaped."""
_FRAME = struct.Struct(">BQII")
_BEFORE = 4 + LENGTH_CODE_BYTES
_decoded = json.JSONDecoder().decode


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


_KINDS = {int(kind): kind for kind in FrameKind}


@carrier(frozen=True, slots=True)
class LinkFrame:
    """One frame."""

    kind: FrameKind
    call: int = 0
    head: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    head_bytes: int = field(default=0, compare=False)
    """Bytes of a received head."""


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

    def seal(self, *frames: LinkFrame) -> bytes:
        """Return the bytes of frames that are sent together. Raises LocalError if one is too long."""
        packets, parts, num_bytes = list[bytes](), list[bytes](), 0
        for frame in frames:
            head = _encoded(frame.head) if frame.head else b""
            length = _FRAME.size + len(head) + len(frame.body)
            if parts and num_bytes + length > TOGETHER_BYTES_MAX:
                packets += self._packet(b"".join(parts))
                parts, num_bytes = [], 0
            parts += (_FRAME.pack(frame.kind, frame.call, len(head), len(frame.body)), head, frame.body)
            num_bytes += length
        return b"".join((*packets, *self._packet(b"".join(parts))))

    def _packet(self, inner: bytes) -> tuple[bytes, ...]:
        if len(inner) > PACKET_BYTES_MAX:
            raise LocalError(f"{len(inner)} bytes are too long for the link of a gateway")
        length = (CODE_BYTES + len(inner)).to_bytes(4, "big")
        codes = (_length_code(self._key, self._number, length), _code(self._key, self._number, inner))
        self._number += 1
        return length, *codes, inner


class FrameOpener:
    """The frames of one direction, as they are received."""

    def __init__(self, key: bytes, *, packet_bytes_max: int = PACKET_BYTES_MAX) -> None:
        self._key, self._number, self._held = key, 0, bytearray()
        self._packet_bytes_max = packet_bytes_max
        self._length = 0

    @property
    def arriving(self) -> tuple[int, int]:
        """Length of the packet that is arriving, 0 until it is known, and the bytes that are here."""
        return self._length, len(self._held)

    def feed(self, data: bytes) -> Iterator[LinkFrame]:
        """Yield the frames whose packets are complete. Raises BrokenLink."""
        self._held += data
        start = 0
        while len(self._held) - start >= _BEFORE:
            begin = start + _BEFORE
            self._length = self._length or self._open_length(bytes(self._held[start:begin]))
            if len(self._held) - begin < self._length:
                break
            start, self._length = begin + self._length, 0
            yield from self._open(bytes(memoryview(self._held)[begin:start]))
        del self._held[:start]

    def _open_length(self, data: bytes) -> int:
        if not hmac.compare_digest(data[4:], _length_code(self._key, self._number, data[:4])):
            raise BrokenLink("a packet whose length has a wrong code")
        length = int.from_bytes(data[:4], "big")
        if not CODE_BYTES + _FRAME.size <= length <= CODE_BYTES + self._packet_bytes_max:
            raise BrokenLink("a packet of an impossible length")
        return length

    def _open(self, packet: bytes) -> Iterator[LinkFrame]:
        inner = memoryview(packet)[CODE_BYTES:]
        if not hmac.compare_digest(packet[:CODE_BYTES], _code(self._key, self._number, inner)):
            raise BrokenLink("a packet whose code is wrong")
        self._number += 1
        at = CODE_BYTES
        while at < len(packet):
            if len(packet) < at + _FRAME.size:
                raise BrokenLink("a frame that is cut off")
            kind, call, head_bytes, body_bytes = _FRAME.unpack_from(packet, at)
            body_at = at + _FRAME.size + head_bytes
            at = body_at + body_bytes
            if (known := _KINDS.get(kind)) is None or len(packet) < at or head_bytes > HEAD_BYTES_MAX:
                raise BrokenLink(f"a frame of a kind, {kind}, that this release does not know, too long, or cut off")
            if len(packet) > max(at, CODE_BYTES + TOGETHER_BYTES_MAX):
                raise BrokenLink("a long packet of several frames")
            head = _head(packet[body_at - head_bytes : body_at])
            yield LinkFrame(known, call, head, packet[body_at:at], head_bytes)


def _encoded(head: dict[str, Any]) -> bytes:
    try:
        return to_json(head)
    except ValueError:  # half a character, of a caller's header: the other side refuses this call alone
        return json.dumps(head).encode()


def _head(data: bytes) -> dict[str, Any]:
    try:
        head = _decoded(data.decode()) if data else {}
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        raise BrokenLink("a frame whose head is no JSON object")
    return head


def _code(key: bytes, number: int, inner: bytes | memoryview) -> bytes:
    return bytes(blake3(number.to_bytes(8, "big"), key=key).update(inner).digest(CODE_BYTES))


def _length_code(key: bytes, number: int, length: bytes) -> bytes:
    return _code(key, number, length)[:LENGTH_CODE_BYTES]
