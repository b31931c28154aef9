"""Parse the header of one HTTP request: where the request ends, and what must not reach the framework.

This is stricter than RFC 9112. A transfer coding is refused: a signer knows the length of its body, and a body in chunks of
one byte costs its receiver a thousand times its size. An upgrade, a folded field, two lengths and any method but GET, HEAD
and POST are refused too. The framework parses the same bytes again; since nothing ambiguous is left, both find the same end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from prime_protocol import limits
from prime_protocol.body_claim import CLAIM_HEADER, REQUEST_HEADER
from prime_protocol.errors import ErrorCode, LimitExceeded, RemoteError
from prime_protocol.visible import printable

END = b"\r\n\r\n"
_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) ([!-~]{1,8000}) HTTP/1\.([01])")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}):[ \t]*+([^\x00-\x08\x0a-\x1f\x7f]*+)")
"""Possessive repeats: spaces before a bad byte are tried once, not in all ways."""
_LENGTH = re.compile(rb"[0-9]{1,15}")
_METHODS = {b"GET", b"HEAD", b"POST"}
_REQUEST, _CLAIM = REQUEST_HEADER.lower().encode(), CLAIM_HEADER.lower().encode()
_ONCE = {b"content-length", b"host", b"transfer-encoding", b"expect"}


@dataclass(frozen=True, slots=True)
class Head:
    """Fields that the server acts on before the framework sees the request."""

    is_head: bool
    """Whether the method is HEAD, whose answer has no body."""
    path: str
    """Path of the request, without its query."""
    body_bytes: int
    host: str
    forwarded: str
    """Value of the header X-Forwarded-For."""
    expects_continue: bool
    signed: bytes
    """Signed statement in the header: the whole request, or the announcement of its body. Empty without one."""


def find_end(data: bytes | bytearray, seen: int) -> int:
    """Return where the header ends, its empty line included; -1 if it is incomplete. Raises RemoteError.

    `seen` bytes were searched before. Bytes that cannot become a header are refused before it is complete.
    """
    if not 65 <= data[0] <= 90:  # A to Z, of the method
        raise RemoteError(ErrorCode.MALFORMED, "this is not HTTP")
    end = data.find(END, max(0, seen - len(END) + 1))
    length = len(data) if end < 0 else end + len(END)
    if length > limits.HTTP_HEADER_BYTES_MAX:
        raise LimitExceeded("HTTP_HEADER_BYTES_MAX", length, limits.HTTP_HEADER_BYTES_MAX, code=ErrorCode.MALFORMED)
    if end < 0 and data.find(b"\n\n", max(0, seen - 1)) >= 0:
        raise RemoteError(ErrorCode.MALFORMED, "this is not HTTP: its lines do not end in CR LF")
    return -1 if end < 0 else length


def read_request_head(data: bytes) -> Head:
    """Parse a complete header, with its empty line. Raises RemoteError."""
    request, *lines = data[: -len(END)].split(b"\r\n")
    found = _REQUEST_LINE.fullmatch(request)
    if found is None:
        raise RemoteError(ErrorCode.MALFORMED, "this is not HTTP: the request line is not one of HTTP/1.1")
    if len(lines) > limits.HTTP_HEADER_LINES_MAX:
        raise LimitExceeded("HTTP_HEADER_LINES_MAX", len(lines), limits.HTTP_HEADER_LINES_MAX, code=ErrorCode.MALFORMED)
    if found[1] not in _METHODS:
        raise RemoteError(ErrorCode.NOT_FOUND, f"no endpoint supports the method {found[1].decode()}")
    fields = _fields(lines)
    if b"transfer-encoding" in fields:
        raise RemoteError(ErrorCode.MALFORMED, "chunked bodies are not accepted here: send Content-Length")
    if b"upgrade" in fields:
        raise RemoteError(ErrorCode.MALFORMED, "this server does not upgrade to another protocol")
    if b"host" not in fields and found[3] == b"1":
        raise RemoteError(ErrorCode.MALFORMED, "a request of HTTP/1.1 must name its Host")
    length, expect = fields.get(b"content-length", b"0"), fields.get(b"expect", b"").lower()
    if not _LENGTH.fullmatch(length):
        raise RemoteError(ErrorCode.MALFORMED, "Content-Length is not a number")
    if expect not in (b"", b"100-continue"):
        raise RemoteError(ErrorCode.MALFORMED, f"the only supported expectation is 100-continue, not {_shown(expect)}")
    return Head(
        is_head=found[1] == b"HEAD",
        path=found[2].partition(b"?")[0].decode(),
        body_bytes=int(length),
        host=_shown(fields.get(b"host", b"")),
        forwarded=_shown(fields.get(b"x-forwarded-for", b"")),
        expects_continue=bool(expect),
        signed=fields.get(_REQUEST, b"") or fields.get(_CLAIM, b""),
    )


def _fields(lines: list[bytes]) -> Mapping[bytes, bytes]:
    """Return the fields by their names in lower case; of repeated ones, the last. Raises RemoteError."""
    fields: dict[bytes, bytes] = {}
    for line in lines:
        found = _FIELD.fullmatch(line)
        if found is None:
            raise RemoteError(ErrorCode.MALFORMED, "this is not HTTP: a header field is not well formed")
        name = found[1].lower()
        if name in _ONCE and name in fields:
            raise RemoteError(ErrorCode.MALFORMED, f"the header {_shown(name)} occurs twice")
        fields[name] = found[2].rstrip(b" \t")
    return fields


def _shown(text: bytes) -> str:
    """Return the whole text as printable: the end of X-Forwarded-For is what counts."""
    return printable(text.decode("latin-1"), limits.HTTP_HEADER_BYTES_MAX)
