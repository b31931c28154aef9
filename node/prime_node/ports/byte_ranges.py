"""Byte ranges in HTTP requests (RFC 9110)."""

from __future__ import annotations

import re

from prime_protocol.errors import ErrorCode, RemoteError


def parse_range(text: str, size: int) -> tuple[int, int]:
    """Parse one byte range of RFC 9110 into [start, end). Raises RemoteError(BAD_RANGE).

    Example: parse_range("bytes=0-9", 100) is (0, 10).
    """
    found = re.fullmatch(r"bytes=([0-9]{0,15})-([0-9]{0,15})", text.strip())
    first, last = found.groups() if found else ("", "")
    if first:
        start, end = int(first), min(size, int(last) + 1) if last else size
    elif last:
        start, end = max(0, size - int(last)), size
    else:
        start, end = 0, 0
    if start >= end:
        raise RemoteError(ErrorCode.BAD_RANGE, f"of {size} bytes, {text[:60]!r} is no range that can be sent")
    return start, end
