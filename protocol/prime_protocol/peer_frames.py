"""Requests and replies on a stream between two peers, and the protocol names of their run. SPEC.md, section "Between peers".

The peer that opens a stream sends requests on it; the other side replies on it, in any order. All numbers are
big-endian.

    request   number u32 | bytes u32 | payload
    reply     number u32 | status u8 | bytes u32 | payload       status 0: the answer, 1: an ErrorBody
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from prime_protocol import limits
from prime_protocol.envelope import parse_json
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.replies import ErrorBody

_REQUEST = struct.Struct(">II")
_REPLY = struct.Struct(">IBI")
REQUEST_HEADER_BYTES = _REQUEST.size
REPLY_HEADER_BYTES = _REPLY.size
ANSWER, REFUSAL = 0, 1


def stream_protocol(run: str, name: str) -> str:
    """Return the libp2p protocol for a kind of request. Example: "/prime-node/<run digest>/pieces/1"."""
    return f"/prime-node/{run}/{name}/1"


@dataclass(frozen=True, slots=True)
class ReplyHeader:
    """Header of a reply: the request's number, whether it was refused, and the size of the payload."""

    number: int
    refused: bool
    num_bytes: int


def pack_request(number: int, payload: bytes) -> bytes:
    """Frame a request."""
    return _REQUEST.pack(number, len(payload)) + payload


def parse_request_header(header: bytes) -> tuple[int, int]:
    """Return (number, bytes of the payload). Raises LimitExceeded."""
    number, num_bytes = _REQUEST.unpack(header)
    return number, _bounded(num_bytes)


def pack_answer(number: int, payload: bytes) -> bytes:
    """Frame the answer to a request."""
    return _REPLY.pack(number, ANSWER, len(payload)) + payload


def pack_refusal(number: int, error: RemoteError) -> bytes:
    """Frame an error as the reply to a request."""
    body = ErrorBody(code=error.code, detail=error.detail, retry_after_s=error.retry_after_s)
    payload = body.model_dump_json().encode()
    return _REPLY.pack(number, REFUSAL, len(payload)) + payload


def parse_reply_header(header: bytes) -> ReplyHeader:
    """Parse the header of a reply. Raises RemoteError(MALFORMED) or LimitExceeded."""
    number, status, num_bytes = _REPLY.unpack(header)
    if status not in (ANSWER, REFUSAL):
        raise RemoteError(ErrorCode.MALFORMED, f"a reply has status 0 or 1, got {status}")
    return ReplyHeader(number, status == REFUSAL, _bounded(num_bytes))


def parse_refusal(payload: bytes) -> RemoteError:
    """Return the error that the other side replied with. Raises RemoteError if it cannot be parsed."""
    body = parse_json(payload, ErrorBody)
    return RemoteError(body.code, body.detail, retry_after_s=body.retry_after_s)


def _bounded(num_bytes: int) -> int:
    if num_bytes > limits.PEER_FRAME_BYTES_MAX:
        raise LimitExceeded("peer_frame_bytes_max", num_bytes, limits.PEER_FRAME_BYTES_MAX)
    return num_bytes
